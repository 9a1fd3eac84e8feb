// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
#include "exl3/cpu/dequant.h"

#include <algorithm>

#include "exl3/cpu/numbers.h"
#include "exl3/cpu/portable.h"
#include "exl3/cpu/rotation.h"

namespace exl3::cpu {
namespace {

constexpr int kTilesPerBlock = kHadamardBlock / kTileSide;
using Block = float[kHadamardBlock][kHadamardBlock];

void transpose(Block& block) {
  for (int i = 0; i < kHadamardBlock; ++i) {
    for (int j = 0; j < i; ++j) std::swap(block[i][j], block[j][i]);
  }
}

// Both transforms stay within blocks of 128 x 128, so each block is on its own.
void decode_block(const Trellis& w, int64_t row, int64_t column, Block& block) {
  const float* table = codebook_table(w.codebook);
  for (int j = 0; j < kTilesPerBlock; ++j) {
    const uint16_t* strip = w.strip(column / kTileSide + j);
    for (int i = 0; i < kTilesPerBlock; ++i) {
      decode_tile(strip + (row / kTileSide + i) * w.words, w.words, table,
                  &block[i * kTileSide][j * kTileSide], kHadamardBlock);
    }
  }
}

}  // namespace

void dequant(const Trellis& w, int64_t n, const uint16_t* suh, const uint16_t* svh,
             float* out, Isa isa, const ParallelFor& parallel) {
  const Rotation& rotation = select_rotation(isa);
  const int64_t across = n / kHadamardBlock;
  parallel(w.k / kHadamardBlock * across, [&](int64_t unit) {
    const int64_t row = unit / across * kHadamardBlock;
    const int64_t column = unit % across * kHadamardBlock;
    alignas(64) Block block;
    decode_block(w, row, column, block);
    if (suh != nullptr) {
      // H is symmetric: the rows of W' are rotated as if they were outputs.
      transpose(block);
      for (auto& line : block) rotation.output(line, suh + row, kHadamardBlock);
      transpose(block);
    }
    for (int i = 0; i < kHadamardBlock; ++i) {
      if (svh != nullptr) rotation.output(block[i], svh + column, kHadamardBlock);
      std::copy_n(block[i], kHadamardBlock, out + (row + i) * n + column);
    }
  });
}

}  // namespace exl3::cpu
