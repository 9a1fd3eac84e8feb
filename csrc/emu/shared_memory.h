// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The shared memory of one block, with a record of who touched each part of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "emu/async_copy.h"
#include "emu/fault.h"

namespace emu {

struct Thread;

// Every access is checked: inside the block's allocation; aligned to its size; written
// before it is read; and ordered. Two accesses of which one writes, by two threads,
// are ordered by a __syncthreads between them, or, inside a warp, by a __syncwarp.
class SharedMemory {
 public:
  // Throws away what was there. The new content is poison: NaN in every format.
  void reset(uint32_t bytes);

  void read(const Thread& thread, uint32_t address, void* to, uint32_t bytes,
            Here here);
  void write(const Thread& thread, uint32_t address, const void* from, uint32_t bytes,
             Here here);

  // An asynchronous copy takes its destination when it is issued, and fills it when
  // it lands. Whoever reads in between reads what is not there yet.
  void begin_copy(const Thread& thread, const AsyncCopy& copy);
  void land(const Thread& thread, const AsyncCopy& copy);

 private:
  // What is known of two neighbouring bytes.
  struct Cell {
    enum State : uint8_t { kPoison, kWritten, kInFlight } state = kPoison;
    int16_t writer = -1;  // thread
    int16_t reader = -1;  // thread; kManyLanes or kManyWarps if several have read
    int16_t reader_warp = -1;
    uint32_t write_epoch = 0, write_warp_epoch = 0;
    uint32_t read_epoch = 0, read_warp_epoch = 0;
  };
  static constexpr int16_t kManyLanes = -2, kManyWarps = -3;

  void check_range(uint32_t address, uint32_t bytes, const char* what, Here here);
  void check_write(const Thread& thread, uint32_t address, uint32_t bytes,
                   const char* what, Here here);
  void mark_written(const Thread& thread, uint32_t address, uint32_t bytes,
                    Cell::State state);
  static bool ordered_after(const Thread& thread, int warp, uint32_t epoch,
                            uint32_t warp_epoch);

  std::vector<char> bytes_;
  std::vector<Cell> cells_;
};

}  // namespace emu
