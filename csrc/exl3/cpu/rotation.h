// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Hadamard transforms of 128-wide blocks, with the scales before and after, and the
// conversions from and to tensors around them. The matrix is Sylvester's,
// H[i][j] = (-1)^popcount(i & j), divided by sqrt(128), so that it is its own inverse.
#pragma once

#include <cstdint>

#include "exl3/cpu/isa.h"
#include "exl3/cpu/numbers.h"

namespace exl3::cpu {

constexpr int kHadamardBlock = 128;

struct Rotation {
  // out [k] = (x * suh) H. `x` has `present` values, at most k; the rest count as zero.
  // `suh` [k] fp16 may be null, which means ones. k is a multiple of 128.
  void (*input)(const void* x, DType dtype, int64_t present, const uint16_t* suh,
                int64_t k, float* out);

  // y [n] = (y H) * svh in place; `svh` [n] fp16 may be null, which means ones.
  void (*output)(float* y, const uint16_t* svh, int64_t n);

  // y [count] += elements first, first + 1, ... of `x`.
  void (*add)(const void* x, int64_t first, int64_t count, DType dtype, float* y);

  // Rounds `values` [count] to elements first, first + 1, ... of `out`.
  void (*store)(const float* values, int64_t count, void* out, int64_t first,
                DType dtype);
};

const Rotation& select_rotation(Isa isa);

extern const Rotation kPortableRotation;
extern const Rotation kAvx2Rotation;
extern const Rotation kAvx512Rotation;

}  // namespace exl3::cpu
