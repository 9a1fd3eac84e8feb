// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// A thread block and its parts, as the emulator keeps them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "emu/async_copy.h"
#include "emu/fault.h"
#include "emu/fiber.h"
#include "emu/shared_memory.h"

namespace emu {

constexpr int kWarpLanes = 32;

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
  unsigned count() const { return x * y * z; }
};

struct Block;
struct Warp;

struct Thread {
  Fiber fiber;
  char* stack = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int number = 0;  // in the block
  int lane = 0;
  Index3 index;
  const char* waits_for = nullptr;  // the barrier or collective that it waited for last
  Here here;                        // and where
  bool waited_for_grid = false;     // has passed griddepcontrol.wait
  AsyncQueue copies;
};

// A warp's lanes meet in collectives: each leaves its operand, the last one computes.
struct Warp {
  Block* block = nullptr;
  int number = 0;         // in the block
  uint32_t alive = 0;     // lanes that have not returned
  uint32_t runnable = 0;  // lanes that wait for nothing
  uint32_t arrived = 0;   // lanes that wait in the collective
  uint32_t epoch = 0;     // how many __syncwarp have passed
  uint32_t priority = 0;  // under an unfair schedule
  const char* collective = nullptr;
  Here here;
  void* operands[kWarpLanes] = {};
};

struct Block {
  Index3 index;
  uint32_t number = 0;  // in the grid
  uint32_t epoch = 0;   // how many __syncthreads have passed
  int alive = 0;        // threads that have not returned
  int arrived = 0;      // threads that wait in __syncthreads
  Here barrier;         // the __syncthreads that they wait in
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  SharedMemory shared;
};

}  // namespace emu
