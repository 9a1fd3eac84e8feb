// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The Hadamard transform of rows, with scales before and after. One warp, one block of
// 128 of one row.
#pragma once

#include "exl3/kernels/elements.cuh"
#include "exl3/kernels/hadamard.cuh"

namespace exl3 {

// Four neighbours twice each, where pipeline.cuh wants them. `index`: of the first,
// were there one of each.
__device__ __forceinline__ void store_four_twice(uint16_t* out, int64_t index,
                                                 const float (&values)[4]) {
  const uint2 four = pack_half4(values);
  const uint2 even = {__byte_perm(four.x, 0, 0x1010), __byte_perm(four.y, 0, 0x1010)};
  const uint2 odd = {__byte_perm(four.x, 0, 0x3232), __byte_perm(four.y, 0, 0x3232)};
  // Eight neighbours become 16: the even ones twice, then the odd ones.
  uint16_t* const to = out + 2 * (index - index % 8) + index % 8;
  ptx::store_global(reinterpret_cast<uint2*>(to), even);
  ptx::store_global(reinterpret_cast<uint2*>(to + 8), odd);
}

// A lane's four results from `column` on; the warp has the piece around them.
__device__ __forceinline__ void transform_four(const TransformParams& p, unsigned row,
                                               int column, const float (&pre)[4],
                                               const float (&post)[4],
                                               float (&values)[4]) {
  load_four(p.x, int64_t{row} * p.width + column, p.width - column, p.width % 4 == 0,
            p.x_type, values);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] *= pre[i];
  hadamard_128(values, threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] *= kHadamardScale * post[i];
}

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
  transform_four(p, row % p.rows, column, pre, post, values);
  if (p.out_type == ElementType::kFloat16) {
    count_clamped(p.clamped, clamp_to_half(values));
  }
  const int64_t index = int64_t{row} * p.k + column;
  if (p.copies == 2) {
    store_four_twice(static_cast<uint16_t*>(p.out), index, values);
  } else {
    store_four(p.out, index, true, p.out_type, values);
  }
}

}  // namespace exl3
