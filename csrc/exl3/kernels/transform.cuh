// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The input transform: scales, Hadamard, fp16. One warp, one row's block of 128.
#pragma once

#include "exl3/kernels/elements.cuh"
#include "exl3/kernels/hadamard.cuh"
#include "exl3/kernels/pipeline.cuh"

namespace exl3 {

struct TransformParams {
  const void* x;        // [rows, width], elements of `type`
  const uint16_t* suh;  // [num_slabs, k] fp16
  uint16_t* out;        // [num_slabs, rows, k] fp16
  ElementType type;
  int rows;
  int width;  // of x; where it is less than k, the rest is zeros
  int k;      // stored in-features, a multiple of 128
  int num_slabs;
};

// Grid: enough blocks that each warp has one of num_slabs * rows * k/128 pieces.
__global__ void __launch_bounds__(kBlockThreads)
    transform_input_kernel(TransformParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t piece = int64_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32;
  const int pieces = p.k / kHadamardBlock;  // of a row
  const int64_t row = piece / pieces;       // over all slabs
  ptx::allow_next_launch();
  if (row >= int64_t{p.num_slabs} * p.rows) return;
  const int column = static_cast<int>(piece % pieces) * kHadamardBlock + 4 * lane;
  const auto slab = row / p.rows;

  float scales[4];
  load_scales(p.suh + slab * p.k + column, scales);
  ptx::wait_for_previous_launch();
  float values[4];
  load_four(p.x, row % p.rows * p.width + column, p.width - column, p.width % 4 == 0,
            p.type, values);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] *= scales[i];
  hadamard_128(values, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] *= kHadamardScale;
  ptx::store_global(reinterpret_cast<uint2*>(p.out + row * p.k + column),
                    pack_half4(values));
}

}  // namespace exl3
