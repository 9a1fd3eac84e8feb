// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// From accumulators to rows: the part of the block's result that a warp transforms.
#pragma once

#include "exl3/kernels/hadamard.cuh"
#include "exl3/kernels/pipeline.cuh"

namespace exl3 {

// The block's result in shared memory: [kRows, 128] float. The padding puts the eight
// rows that a warp stores at once into different banks.
constexpr int kResultPitch = (kBlockColumns + 8) * 4;  // bytes

template <int kRows>
constexpr int kResultBytes = kRows * kResultPitch;

template <int kRows>
__device__ __forceinline__ void store_result(uint32_t base,
                                             const Accumulators<kRows>& sums) {
  const int lane = threadIdx.x % 32;
  const int column = threadIdx.x / 32 * kTileSide + lane % 4 * 2;
  const uint32_t corner = base + lane / 4 * kResultPitch + column * 4;
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float (&v)[4] = sums.values[i][j];
      const uint32_t place = corner + i * 16 * kResultPitch + j * 8 * 4;
      ptx::store_shared(place, float2{v[0], v[1]});
      ptx::store_shared(place + 8 * kResultPitch, float2{v[2], v[3]});
    }
  }
}

// A lane's four neighbours of a row, with the output transform: H / sqrt(128), scales.
__device__ __forceinline__ void transformed_row(uint32_t base, int row,
                                                const float (&scales)[4],
                                                float (&values)[4]) {
  const int lane = threadIdx.x % 32;
  const auto four =
      ptx::load_shared<float4>(base + row * kResultPitch + lane * kChunkBytes);
  values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
  hadamard_128(values, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] *= kHadamardScale * scales[i];
}

}  // namespace exl3
