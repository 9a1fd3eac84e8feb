// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Twin of exl3/ptx/async.cuh.
#pragma once

#include "emu/device.h"

namespace ptx {

inline void copy_async_or_zero(uint32_t shared, const void* global, bool valid,
                               emu::Here here = emu::Here::at()) {
  emu::Thread& thread = *emu::current;
  const uint32_t bytes = valid ? 16 : 0;
  if (valid) emu::device->memory.check_read(thread, global, 16, here);
  if (emu::device->banks) {
    emu::device->banks->access(thread, "cp.async", shared, 16, here);
  }
  const emu::AsyncCopy copy{shared, global, 16, bytes, here};
  thread.block->shared.begin_copy(thread, copy);
  thread.copies.add(copy);
}

inline void copy_async(uint32_t shared, const void* global,
                       emu::Here here = emu::Here::at()) {
  copy_async_or_zero(shared, global, true, here);
}

// There is no cache here.
using CachePolicy = uint64_t;
inline CachePolicy evict_first_policy() { return 0; }

inline void copy_async(uint32_t shared, const void* global, CachePolicy,
                       emu::Here here = emu::Here::at()) {
  copy_async(shared, global, here);
}

inline void commit_copies() { emu::current->copies.commit(); }

template <int kPending>
void wait_copies() {
  emu::Thread& thread = *emu::current;
  thread.copies.wait(kPending, [&](const emu::AsyncCopy& copy) {
    thread.block->shared.land(thread, copy);
  });
}

}  // namespace ptx
