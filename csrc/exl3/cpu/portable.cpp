// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
#include "exl3/cpu/portable.h"

#include <array>
#include <memory>

#include "exl3/cpu/float_rows.h"

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

template <Codebook kCodebook>
struct Portable {
  using Weight = float;
  using Activation = float;
  static constexpr int64_t kTiles = 16;  // 16 KiB, half of a usual L1 cache
  static constexpr int kRows = 1;

  static void decode(const uint16_t* tiles, int words, int64_t count, float* block) {
    const float* table = codebook_table(kCodebook);
    for (int64_t i = 0; i < count; ++i) {
      decode_tile(tiles + i * words, words, table, block + i * kTileWeights, kTileSide);
    }
  }

  template <int>
  static void multiply(const float* block, int64_t tiles, const float* x, int64_t,
                       float* y, int64_t) {
    float sums[kTileSide] = {};
    for (int64_t i = 0; i < tiles * kTileSide; ++i) {
      for (int column = 0; column < kTileSide; ++column) {
        sums[column] += x[i] * block[i * kTileSide + column];
      }
    }
    for (int column = 0; column < kTileSide; ++column) y[column] += sums[column];
  }
};

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

const Kernel kPortable[kCodebooks] = {
    float_kernel<Portable<Codebook::k3Inst>>("portable"),
    float_kernel<Portable<Codebook::kMcg>>("portable"),
    float_kernel<Portable<Codebook::kMul1>>("portable"),
};

}  // namespace exl3::cpu
