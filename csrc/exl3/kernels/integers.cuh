// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Sums of mul1's bytes times integer activations, and what they stand for.
#pragma once

#include "exl3/kernels/pipeline.cuh"

namespace exl3 {

// A weight is (1774 s - 905216) 2^-18 for s = the sum of its four bytes, before the
// format rounds it. So with activations x = scale q, and sums over k,
//
//   sum of x w = scale 2^-18 (1774 sum of q s - 905216 sum of q)
//
// and all but the scale is exact. scales and stage_sums: this slab's and block's first
// row's; stage_sums [rows, k/64] are sums of q.
template <int kRows>
__device__ __forceinline__ void to_float(const IntegerSums& integers,
                                         const Operands& from, const float* scales,
                                         const int* stage_sums,
                                         Accumulators<kRows>& sums) {
  static_assert(kRows == 16);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    const bool exists = row < from.rows;
    int sum = 0;
    if (exists) {
      const int* of_row = stage_sums + row * (from.k / kStageDepth);
      for (int i = from.first_stage + lane % 4; i < from.end_stage; i += 4) {
        sum += ptx::load_global(of_row + i);
      }
    }
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    const float scale = exists ? ptx::load_global(scales + row) * 0x1p-18f : 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const int64_t products =
            int64_t{integers.values[0][j][i]} * 256 + integers.values[1][j][i];
        const int64_t whole = 1774 * products - int64_t{905216} * sum;
        sums.values[0][j][i] = scale * static_cast<float>(whole);
      }
    }
  }
}

}  // namespace exl3
