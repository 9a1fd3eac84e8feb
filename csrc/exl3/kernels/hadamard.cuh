// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The Hadamard transform of 128 values by one warp.
#pragma once

#include "exl3/kernels/params.h"
#include "exl3/ptx/ptx.cuh"

namespace exl3 {

constexpr float kHadamardScale = 0.08838834764831845f;  // 1 / sqrt(128)
constexpr unsigned kFullWarp = 0xffffffffu;

// Lane l holds values 4l to 4l+3, before and after. Not scaled: times kHadamardScale it
// is its own inverse.
__device__ __forceinline__ void hadamard_128(float (&values)[4], int lane) {
  const float a = values[0] + values[1], b = values[0] - values[1];
  const float c = values[2] + values[3], d = values[2] - values[3];
  values[0] = a + c;
  values[1] = b + d;
  values[2] = a - c;
  values[3] = b - d;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float sign = lane & distance ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = values[i] * sign + __shfl_xor_sync(kFullWarp, values[i], distance);
    }
  }
}

}  // namespace exl3
