// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
#include "exl3/cpu/portable.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "exl3/cpu/buffer.h"

namespace exl3::cpu {
namespace {

using Table = std::array<float, kStates>;

std::unique_ptr<Table> make_table(Codebook codebook) {
  auto table = std::make_unique<Table>();
  for (int state = 0; state < kStates; ++state) {
    (*table)[state] = codebook_value(codebook, state);
  }
  return table;
}

size_t packed_bytes(int64_t rows, int64_t k) {
  return round_up(rows * k * sizeof(float), kCacheLine);
}

void pack(const float* x, int64_t k, int64_t row, std::byte* packed) {
  std::memcpy(packed + row * k * sizeof(float), x, k * sizeof(float));
}

// Tiles that are decoded before they are used: 16 KiB, half of a usual L1 cache.
constexpr int64_t kBlockTiles = 16;

void multiply(const Trellis& w, int64_t strip, const std::byte* packed, int64_t rows,
              float* y, int64_t y_stride) {
  const float* table = codebook_table(w.codebook);
  const uint16_t* tiles = w.strip(strip);
  const auto* x = reinterpret_cast<const float*>(packed);
  const int64_t count = w.k / kTileSide;
  float block[kBlockTiles * kTileWeights];
  for (int64_t row = 0; row < rows; ++row) {
    std::fill_n(y + row * y_stride, kTileSide, 0.0f);
  }
  for (int64_t first = 0; first < count; first += kBlockTiles) {
    const int64_t used = std::min(kBlockTiles, count - first);
    for (int64_t i = 0; i < used; ++i) {
      decode_tile(tiles + (first + i) * w.words, w.words, table,
                  block + i * kTileWeights, kTileSide);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const float* x_row = x + row * w.k + first * kTileSide;
      float sums[kTileSide] = {};
      for (int64_t i = 0; i < used * kTileSide; ++i) {
        for (int column = 0; column < kTileSide; ++column) {
          sums[column] += x_row[i] * block[i * kTileSide + column];
        }
      }
      for (int column = 0; column < kTileSide; ++column) {
        y[row * y_stride + column] += sums[column];
      }
    }
  }
}

}  // namespace

const float* codebook_table(Codebook codebook) {
  static const std::unique_ptr<Table> tables[kCodebooks] = {
      make_table(Codebook::k3Inst), make_table(Codebook::kMcg),
      make_table(Codebook::kMul1)};
  return tables[static_cast<int>(codebook)]->data();
}

void decode_tile(const uint16_t* tile, int words, const float* table, float* out,
                 int64_t stride) {
  for (int t = 0; t < kTileWeights; ++t) {
    const int index = tile_index(t);
    out[index / kTileSide * stride + index % kTileSide] =
        table[trellis_state(tile, words, t)];
  }
}

const Kernel kPortable{"portable", packed_bytes, pack, multiply};

}  // namespace exl3::cpu
