// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// cp.async of one thread: copies that are under way until a wait proves them done.
#pragma once

#include <cstddef>
#include <cstdint>
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
  void add(const AsyncCopy& copy) { copies_.push_back({copy, committed_}); }
  void commit() { ++committed_; }

  // Lets all but the newest `pending` groups land.
  template <class Land>
  void wait(uint64_t pending, Land land) {
    size_t landed = 0;
    while (landed < copies_.size() && copies_[landed].group + pending < committed_) {
      land(copies_[landed++].copy);
    }
    copies_.erase(copies_.begin(), copies_.begin() + static_cast<ptrdiff_t>(landed));
  }

 private:
  struct Numbered {
    AsyncCopy copy;
    uint64_t group;
  };
  std::vector<Numbered> copies_;  // under way, oldest first
  uint64_t committed_ = 0;        // groups; the open one has this number
};

}  // namespace emu
