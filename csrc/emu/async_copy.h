// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// cp.async of one thread: copies that are under way until a wait proves them done.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "emu/fault.h"

namespace emu {

struct AsyncCopy {
  uint32_t shared;       // destination, byte offset in the block's shared memory
  const void* global;    // source
  uint32_t bytes;        // 4, 8 or 16
  uint32_t from_source;  // the first so many bytes are copied, the rest is zeros
  Here here;
};

// Data lands at the latest legal moment: in wait(), for the groups it waits for.
// A copy that no wait covers never lands.
class AsyncQueue {
 public:
  void add(const AsyncCopy& copy) { open_.push_back(copy); }
  void commit() { groups_.push_back(std::move(open_)), open_.clear(); }

  // Lets all but the newest `pending` groups land.
  template <class Land>
  void wait(size_t pending, Land land) {
    while (groups_.size() > pending) {
      for (const AsyncCopy& copy : groups_.front()) land(copy);
      groups_.pop_front();
    }
  }

 private:
  std::vector<AsyncCopy> open_;
  std::deque<std::vector<AsyncCopy>> groups_;
};

}  // namespace emu
