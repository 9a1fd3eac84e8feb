// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Sums over k that several blocks share: each leaves its part in the workspace, and the
// block that arrives last adds the parts up, always in the same order. So the result
// doesn't depend on who was last, and no block waits for another.
#pragma once

#include "exl3/kernels/pipeline.cuh"

namespace exl3 {

// Floats of one part: the accumulators, register by register, each 256 threads wide.
template <int kRows>
constexpr int64_t kPartFloats = int64_t{kRows} * kBlockColumns;

template <int kRows>
__device__ __forceinline__ void store_part(float* part,
                                           const Accumulators<kRows>& sums) {
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    ptx::store_global(part + i * kBlockThreads + threadIdx.x,
                      sums.values[i / 8][i / 4 % 2][i % 4]);
  }
}

template <int kRows>
__device__ __forceinline__ void add_part(const float* part, Accumulators<kRows>& sums) {
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    sums.values[i / 8][i / 4 % 2][i % 4] +=
        ptx::load_global(part + i * kBlockThreads + threadIdx.x);
  }
}

// Called by all threads of a block when its part is stored. True in the block that
// comes last of `parts`; it may read them all. The counter is then 0 again, ready for
// the next launch. `flag`: four bytes of shared memory that nobody else uses.
__device__ __forceinline__ bool arrive_last(unsigned* counter, int parts,
                                            uint32_t flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto last = static_cast<unsigned>(parts - 1);
    ptx::store_shared<uint32_t>(flag, atomicInc(counter, last) == last);
    __threadfence();
  }
  __syncthreads();
  return ptx::load_shared<uint32_t>(flag) != 0;
}

}  // namespace exl3
