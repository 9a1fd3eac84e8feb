// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Global memory: the buffers a launch may touch, who wrote what, and in what order.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "emu/fault.h"

namespace emu {

struct Block;
struct Thread;

enum class Access {
  kRead,           // the kernel may only read it
  kReadWrite,      // initialized by the host
  kUninitialized,  // scratch or output: to be written before it is read
};

// Every access is checked: inside one buffer, aligned, allowed, initialized; and
// ordered. A thread may read what a thread of another block wrote only if the writer
// fenced and then made an atomic operation, and the reader's block made one on the same
// address after that, and then fenced. Order through a chain of blocks isn't followed.
class GlobalMemory {
 public:
  void add(std::string name, void* data, size_t bytes, Access access);

  // Forgets who wrote what: a launch sees all of what the launch before it wrote. A
  // programmatic launch may overlap the one before it until griddepcontrol.wait.
  void begin_launch(bool programmatic);

  void check_read(const Thread& thread, const void* from, size_t bytes, Here here,
                  bool non_coherent = false);
  void check_write(const Thread& thread, void* to, size_t bytes, Here here);
  void fence(const Thread& thread);
  void atomic(const Thread& thread, void* address, size_t bytes, Here here);

 private:
  // What is known of two neighbouring bytes of a buffer that may be written.
  struct Cell {
    uint32_t launch = 0;  // that wrote it; 0: none has
    uint32_t block = 0, thread = 0, epoch = 0, warp_epoch = 0;
    uint64_t step = 0;
  };
  struct Buffer {
    std::string name;
    char* begin;
    size_t bytes;
    Access access;
    std::vector<Cell> cells;
  };
  struct Fence {
    uint64_t step = 0;
    uint32_t epoch = 0;  // of the block
  };
  struct Atomic {
    const void* address;
    uint64_t step;
    uint32_t thread, epoch;
    Fence fence;  // the same thread's last one before it
  };
  struct Order {  // of one block of the running launch
    Fence last_fence;
    std::unordered_map<uint32_t, Fence> fences;  // by thread: its last one
    std::vector<Atomic> atomics;
  };

  Buffer& find(const void* data, size_t bytes, const char* what, Here here);
  bool ordered(const Cell& cell, uint32_t reader_block) const;
  void check_order(const Thread& thread, const Cell& cell, const Buffer& buffer,
                   size_t offset, const char* what, Here here) const;

  std::vector<Buffer> buffers_;
  size_t last_ = 0;  // buffer found last
  std::unordered_map<uint32_t, Order> orders_;
  uint64_t step_ = 0;
  uint32_t launch_ = 0;
  uint32_t settled_ = 0;  // launches up to this one have ended for certain
};

}  // namespace emu
