// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Activations of the kernels that multiply floats: the rows as they are.
#pragma once

#include <cstring>

#include "exl3/cpu/blocked.h"
#include "exl3/cpu/buffer.h"
#include "exl3/cpu/kernel.h"

namespace exl3::cpu {

inline size_t float_rows_bytes(int64_t rows, int64_t k) {
  return rows * k * sizeof(float);
}

inline void pack_float_row(const float* x, int64_t k, int64_t row, int64_t,
                           std::byte* packed) {
  std::memcpy(packed + row * k * sizeof(float), x, k * sizeof(float));
}

template <typename Scheme>
void multiply_float_rows(const Trellis& w, int64_t first_strip, int64_t strips,
                         const std::byte* packed, int64_t rows, float* y,
                         int64_t y_stride) {
  multiply_blocked<Scheme>(w, first_strip, strips,
                           reinterpret_cast<const float*>(packed), rows, y, y_stride);
}

template <typename Scheme>
constexpr Kernel float_kernel(const char* name) {
  return {name, float_rows_bytes, pack_float_row, multiply_float_rows<Scheme>};
}

}  // namespace exl3::cpu
