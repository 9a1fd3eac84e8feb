// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The Hadamard transform of rows, with scales before and after. One warp, one block of
// 128 of one row.
#pragma once

#include "exl3/kernels/elements.cuh"
#include "exl3/kernels/hadamard.cuh"

namespace exl3 {

// Grid: enough blocks that each warp has one of num_slabs * rows * k/128 pieces.
__global__ void __launch_bounds__(kBlockThreads) transform_kernel(TransformParams p) {
  const int lane = threadIdx.x % 32;
  const unsigned piece = blockIdx.x * kBlockWarps + threadIdx.x / 32;
  const unsigned pieces = p.k / kHadamardBlock;  // of a row
  const unsigned row = piece / pieces;           // over all slabs
  ptx::allow_next_launch();
  if (row >= int64_t{p.num_slabs} * p.rows) return;
  const int column = static_cast<int>(piece % pieces) * kHadamardBlock + 4 * lane;
  const int64_t scale = int64_t{row / p.rows} * p.k + column;

  float pre[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  float post[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (p.pre != nullptr) load_scales(p.pre + scale, pre);
  if (p.post != nullptr) load_scales(p.post + scale, post);
  ptx::wait_for_previous_launch();
  float values[4];
  load_four(p.x, int64_t{row % p.rows} * p.width + column, p.width - column,
            p.width % 4 == 0, p.x_type, values);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] *= pre[i];
  hadamard_128(values, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] *= kHadamardScale * post[i];
    if (p.out_type == ElementType::kFloat16) values[i] = clamp_to_half(values[i]);
  }
  store_four(p.out, int64_t{row} * p.k + column, true, p.out_type, values);
}

}  // namespace exl3
