// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The geometry of one tile: 16 x 16 weights in `words` int16 words, 16 words for each
// bit per weight. Half rates have 24, 40 or 56 words, so nothing here counts in bits
// per weight. Host and device, plain C++17.
#pragma once

#include <cstdint>

#include "exl3/codec/codebook.h"

namespace exl3 {

constexpr int kTileSide = 16;
constexpr int kTileWeights = 256;
constexpr int kStateBits = 16;
constexpr int kMaxWords = 128;

// Whether tiles of so many words exist: 1 to 8 bits; 1.5, 2.5 and 3.5 with mul1 only.
EXL3_HD constexpr bool legal_words(int64_t words, int64_t codebook) {
  if (codebook < 0 || codebook >= kCodebooks) return false;
  if (words > 0 && words <= kMaxWords && words % 16 == 0) return true;
  return codebook == static_cast<int>(Codebook::kMul1) &&
         (words == 24 || words == 40 || words == 56);
}

// A tile is a ring of 16 * words bits, each word's most significant bit first; the
// words of each pair are swapped, so that a little-endian uint32 holds 32 consecutive
// bits:
//
//   ring   | w1         | w0         | w3         | w2         | ...    (w1 again)
//   weight | 0 | 1 | 2 | 3 | 4 | ...              each owns fresh_bits(words, t)
//              [-- state of t --]                 the 16 bits that end with t's own
//
// Weight t, in trellis order, owns words/16 fresh bits; at half rates the even weights
// half a bit less and the odd ones half a bit more.
EXL3_HD constexpr int fresh_bits(int words, int t) { return (words / 8 + (t & 1)) / 2; }

// Where weight t's own bits end.
EXL3_HD constexpr int end_bit(int words, int t) { return (t + 1) * words / 16; }

// Ring word i, of the tile's stored words.
EXL3_HD inline uint32_t ring_word(const uint16_t* tile, int i) { return tile[i ^ 1]; }

// The 16-bit state of weight t, 0 <= t < 256.
EXL3_HD inline uint32_t trellis_state(const uint16_t* tile, int words, int t) {
  const int ring_bits = 16 * words;
  int first = end_bit(words, t) - kStateBits;
  if (first < 0) first += ring_bits;
  const int word = first / 16;
  const int next = word + 1 == words ? 0 : word + 1;
  const uint32_t both = ring_word(tile, word) << 16 | ring_word(tile, next);
  return both >> (16 - first % 16) & 0xFFFF;
}

// Writes the ring whose states are `states` [256], each continuing the one before.
EXL3_HD inline void pack_states(const uint16_t* states, int words, uint16_t* tile) {
  uint32_t pending = 0;  // the low `count` bits are not yet written
  int count = 0;
  int word = 0;
  for (int t = 0; t < kTileWeights; ++t) {
    const int bits = fresh_bits(words, t);
    pending = pending << bits | (states[t] & ((1u << bits) - 1));
    count += bits;
    if (count >= 16) {
      count -= 16;
      tile[word++ ^ 1] = static_cast<uint16_t>(pending >> count);
    }
  }
}

// Trellis order is the order of a GPU lane's registers: lane t / 8 holds its share of
// two 16 x 8 operands of mma.m16n8k16. Row-major index, 16 * row + column, of weight t;
// rows run along k, columns along n.
EXL3_HD constexpr int tile_index(int t) {
  const int lane = t >> 3;
  const int row = 2 * (lane & 3) + (t & 1) + 8 * ((t >> 1) & 1);
  const int column = (lane >> 2) + 8 * ((t >> 2) & 1);
  return kTileSide * row + column;
}

}  // namespace exl3
