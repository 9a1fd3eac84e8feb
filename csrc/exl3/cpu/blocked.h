// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The loops that every kernel has: some tiles of a strip are decoded to the L1 cache,
// and then multiplied with all rows, a few rows at once.
#pragma once

#include <algorithm>

#include "exl3/cpu/buffer.h"
#include "exl3/cpu/kernel.h"

namespace exl3::cpu {

// Scheme says how one kernel does it:
//   Weight, Activation        what is decoded and what rows are made of
//   kTiles                    tiles that are decoded at once
//   kRows                     rows that are multiplied at once
//   decode(tiles, words, count, block)
//   multiply<rows>(block, tiles, x, x_stride, y, y_stride)
//                             adds to y [rows, 16]; x starts at the block's first k
template <typename Scheme, int kRows = Scheme::kRows>
void multiply_rows(int64_t rows, const typename Scheme::Weight* block, int64_t tiles,
                   const typename Scheme::Activation* x, int64_t x_stride, float* y,
                   int64_t y_stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      multiply_rows<Scheme, kRows - 1>(rows, block, tiles, x, x_stride, y, y_stride);
      return;
    }
  }
  Scheme::template multiply<kRows>(block, tiles, x, x_stride, y, y_stride);
}

// y [rows, 16 * strips] = x [rows, k] times some strips. All strips use a block of x
// before the next block is touched, so that it comes from the L2 cache.
template <typename Scheme>
void multiply_blocked(const Trellis& w, int64_t first_strip, int64_t strips,
                      const typename Scheme::Activation* x, int64_t rows, float* y,
                      int64_t y_stride) {
  alignas(kCacheLine) typename Scheme::Weight block[Scheme::kTiles * kTileWeights];
  for (int64_t row = 0; row < rows; ++row) {
    std::fill_n(y + row * y_stride, strips * kTileSide, 0.0f);
  }
  const int64_t count = w.k / kTileSide;
  for (int64_t first = 0; first < count; first += Scheme::kTiles) {
    const int64_t tiles = std::min<int64_t>(Scheme::kTiles, count - first);
    for (int64_t strip = 0; strip < strips; ++strip) {
      Scheme::decode(w.strip(first_strip + strip) + first * w.words, w.words, tiles,
                     block);
      for (int64_t row = 0; row < rows; row += Scheme::kRows) {
        multiply_rows<Scheme>(rows - row, block, tiles,
                              x + row * w.k + first * kTileSide, w.k,
                              y + row * y_stride + strip * kTileSide, y_stride);
      }
    }
  }
}

}  // namespace exl3::cpu
