// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// cp.async: copies from global to shared memory that overlap with the work.
#pragma once

#include <cstdint>

namespace ptx {

// 16 bytes, past L1; L2 fetches the 128 around them.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared),
               "l"(global)
               : "memory");
}

// What L2 is to do with what a copy fetches.
using CachePolicy = uint64_t;

// Let it go first: nobody reads it again.
__device__ __forceinline__ CachePolicy evict_first_policy() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_async(uint32_t shared, const void* global,
                                           CachePolicy policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(
          shared),
      "l"(global), "l"(policy)
      : "memory");
}

// 16 bytes, or as many zeros if not `valid`; then `global` isn't read. The size is the
// condition, since a predicated cp.async has been seen to be miscompiled.
__device__ __forceinline__ void copy_async_or_zero(uint32_t shared, const void* global,
                                                   bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(global), "r"(bytes)
               : "memory");
}

// Closes the group of copies that this thread has issued.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the newest kPending groups of this thread have landed. Other
// threads see the data after a barrier.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx
