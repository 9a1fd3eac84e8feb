// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Hadamard transforms of 128-wide blocks, with the scales before and after. The matrix
// is Sylvester's, H[i][j] = (-1)^popcount(i & j), divided by sqrt(128), so that it is
// its own inverse.
#pragma once

#include <cstdint>

#include "exl3/cpu/numbers.h"

namespace exl3::cpu {

constexpr int kHadamardBlock = 128;

// out [k] = (x * suh) H. `x` has `present` values, at most k; the rest count as zero.
// `suh` [k] fp16 may be null, which means ones. k is a multiple of 128.
void rotate_input(const void* x, DType dtype, int64_t present, const uint16_t* suh,
                  int64_t k, float* out);

// y [n] = (y H) * svh in place; `svh` [n] fp16 may be null, which means ones.
void rotate_output(float* y, const uint16_t* svh, int64_t n);

// values [count] *= scales [count] fp16.
void multiply(float* values, const uint16_t* scales, int64_t count);

// y [count] += x [count], which starts at element `first` of a tensor.
void add(const void* x, int64_t first, int64_t count, DType dtype, float* y);

// Rounds `values` [count] to elements first, first + 1, ... of `out`.
void store(const float* values, int64_t count, void* out, int64_t first, DType dtype);

}  // namespace exl3::cpu
