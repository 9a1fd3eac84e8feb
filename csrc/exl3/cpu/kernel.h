// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What every kernel does: it multiplies packed activations with strips of a trellis
// matrix. A strip is 16 columns; its k / 16 tiles lie one after another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exl3/codec/trellis.h"
#include "exl3/cpu/isa.h"

namespace exl3::cpu {

// A matrix [k, n] in strip-major order: tiles [n / 16][k / 16][words].
struct Trellis {
  const uint16_t* tiles;
  int64_t k;
  int words;
  Codebook codebook;

  const uint16_t* strip(int64_t index) const {
    return tiles + index * (k / kTileSide) * words;
  }
};

struct Kernel {
  const char* name;
  // Size of `rows` packed rows of k activations, a multiple of a cache line.
  size_t (*packed_bytes)(int64_t rows, int64_t k);
  // Packs one rotated row [k] as row number `row` of the `rows` in `packed`.
  void (*pack)(const float* x, int64_t k, int64_t row, int64_t rows, std::byte* packed);
  // y [rows, 16 * strips], of row stride `y_stride`, = packed activations times
  // neighbouring strips, an even number of them.
  void (*multiply)(const Trellis& w, int64_t first_strip, int64_t strips,
                   const std::byte* packed, int64_t rows, float* y, int64_t y_stride);
};

// The fastest kernel of the instruction set for `rows` rows. With `exact`, the weights
// have the format's own fp16 values and the activations are float.
const Kernel& select_kernel(Isa isa, Codebook codebook, int64_t rows, bool exact);

}  // namespace exl3::cpu
