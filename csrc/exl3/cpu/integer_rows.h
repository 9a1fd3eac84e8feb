// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Integer activations, and the kernels that multiply them with integers that stand for
// weights. A weight is scale * integer + offset, so that
//
//   y = scale * sum(x * integer) + offset * sum(x)
//
// and the first sum is exact, block by block. For mul1 the integer is the sum of the
// hash's four bytes. Each row is scaled so that its largest activation is as large as
// the sums' 32 bits allow; rounding the activations to integers is the only error.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exl3/cpu/blocked.h"
#include "exl3/cpu/buffer.h"
#include "exl3/cpu/kernel.h"

namespace exl3::cpu {

// Whether 32 bits hold any sum of so many products.
constexpr bool integers_hold(int64_t products, int64_t weight, int64_t activation) {
  return products * weight * activation <= INT32_MAX;
}

// What makes results of a row's integer sums. These stand before the rows.
struct Affine {
  float factor;
  float offset;
};

inline size_t affine_bytes(int64_t rows) {
  return round_up(rows * sizeof(Affine), kCacheLine);
}

inline Affine& affine_of(std::byte* packed, int64_t row) {
  return reinterpret_cast<Affine*>(packed)[row];
}

inline int16_t* integer_row(std::byte* packed, int64_t rows, int64_t k, int64_t row) {
  return reinterpret_cast<int16_t*>(packed + affine_bytes(rows)) + row * k;
}

inline size_t integer_rows_bytes(int64_t rows, int64_t k) {
  return affine_bytes(rows) + rows * k * sizeof(int16_t);
}

template <typename Scheme>
void multiply_integer_rows(const Trellis& w, int64_t first_strip, int64_t strips,
                           const std::byte* packed, int64_t rows, float* y,
                           int64_t y_stride) {
  const auto* x = reinterpret_cast<const int16_t*>(packed + affine_bytes(rows));
  multiply_blocked<Scheme>(w, first_strip, strips, x, rows, y, y_stride);
  const auto* affine = reinterpret_cast<const Affine*>(packed);
  for (int64_t row = 0; row < rows; ++row) {
    const auto [factor, offset] = affine[row];
    float* results = y + row * y_stride;
    for (int64_t i = 0; i < strips * kTileSide; ++i) {
      results[i] = results[i] * factor + offset;
    }
  }
}

// `pack` is the kernel's own, since the order within 16 activations is.
template <typename Scheme>
constexpr Kernel integer_kernel(const char* name, decltype(Kernel::pack) pack) {
  return {name, integer_rows_bytes, pack, multiply_integer_rows<Scheme>};
}

}  // namespace exl3::cpu
