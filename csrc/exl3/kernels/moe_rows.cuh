// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What happens to rows before and after the experts' products.
#pragma once

#include "exl3/kernels/elements.cuh"
#include "exl3/kernels/hadamard.cuh"
#include "exl3/kernels/moe_params.h"

namespace exl3 {

// The input transforms of gate and up, from one read of x. A warp has a block of 128 of
// one row of one slice. Grid: a warp for each of slices * pairs * hidden/128.
__global__ void __launch_bounds__(kBlockThreads) moe_rotate_kernel(MoeParams p) {
  const int lane = threadIdx.x % 32;
  const unsigned piece = blockIdx.x * kBlockWarps + threadIdx.x / 32;
  const unsigned pieces = p.hidden / kHadamardBlock;  // of a row
  const int row = static_cast<int>(piece / pieces % p.pairs());
  const int slice = static_cast<int>(piece / pieces / p.pairs());
  const int column = static_cast<int>(piece % pieces) * kHadamardBlock + 4 * lane;
  ptx::allow_next_launch();
  ptx::wait_for_previous_launch();
  if (slice >= p.slices || row >= ptx::load_global(&p.totals->rows)) return;

  const int token = ptx::load_global(p.row_pair + row) / p.top_k;
  const int64_t expert =
      int64_t{ptx::load_global(p.row_expert + row)} * p.slices + slice;
  float x[4];
  load_four(p.x, int64_t{token} * p.width + column, p.width - column, p.width % 4 == 0,
            p.type, x);
#pragma unroll
  for (int projection = 0; projection < 2; ++projection) {
    float values[4];
    load_scales(p.suh13 + (expert * 2 + projection) * p.hidden + column, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= x[i];
    hadamard_128(values, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= kHadamardScale;
    count_clamped(p.clamped, clamp_to_half(values));
    const int64_t to = (int64_t{slice} * 2 + projection) * p.pairs() + row;
    ptx::store_global(reinterpret_cast<uint2*>(p.rotated + to * p.hidden + column),
                      pack_half4(values));
  }
}

// out = the weighted sum of a token's products: experts in the router's order, an
// expert's slices in theirs. Grid: a warp for each 128 columns of a token.
__global__ void __launch_bounds__(kBlockThreads) moe_combine_kernel(MoeParams p) {
  const int lane = threadIdx.x % 32;
  const unsigned piece = blockIdx.x * kBlockWarps + threadIdx.x / 32;
  const unsigned pieces = p.hidden / kHadamardBlock;
  const int token = static_cast<int>(piece / pieces);
  const int column = static_cast<int>(piece % pieces) * kHadamardBlock + 4 * lane;
  ptx::allow_next_launch();
  ptx::wait_for_previous_launch();
  if (token >= p.tokens || column >= p.width) return;

  float sums[4] = {};
  for (int i = 0; i < p.top_k; ++i) {
    const int pair = token * p.top_k + i;
    const int row = ptx::load_global(p.pair_row + pair);
    if (row < 0) continue;
    const float weight = ptx::load_global(p.topk_weights + pair);
    for (int slice = 0; slice < p.slices; ++slice) {
      const int64_t from = (int64_t{slice} * p.pairs() + row) * p.hidden + column;
      const float4 four =
          ptx::load_global(reinterpret_cast<const float4*>(p.products + from));
      sums[0] += weight * four.x;
      sums[1] += weight * four.y;
      sums[2] += weight * four.z;
      sums[3] += weight * four.w;
    }
  }
  const int64_t to = int64_t{token} * p.width + column;
  if (column + 4 <= p.width) {
    store_four(p.out, to, p.width % 4 == 0, p.type, sums);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < p.width) store_element(p.out, to + i, sums[i], p.type);
    }
  }
}

}  // namespace exl3
