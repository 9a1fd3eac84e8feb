// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The encoder of tiles: the ring of states whose values are nearest to 256 weights.
#pragma once

#include <cstdint>
#include <memory>

#include "exl3/codec/trellis.h"
#include "exl3/encode/step.h"

namespace exl3::encode {

// Costs of the tiles of a batch would all fall into the same sets of the cache if they
// were a power of two apart; so there is a cache line of nothing between them.
constexpr int kGap = 16;

struct Tables;  // what the search looks up, for one rate and codebook

// Encodes tiles one batch after another, in memory of its own: one for each thread.
class TileEncoder {
 public:
  // `words` and `codebook` are legal, see legal_words.
  TileEncoder(int words, Codebook codebook, Tier tier);

  // Encodes 1 to kBatch tiles.
  //   tiles   [count, 256] weights, row-major 16 x 16
  //   packed  [count, words] out
  //   values  [count, 256] out: the weights that `packed` decodes to, row-major
  void encode(const float* tiles, int count, uint16_t* packed, float* values);

 private:
  // A step's nodes before weight t are the low bits of the state of weight t - 1.
  int node_bits(int t) const { return kStateBits - fresh_bits(words_, t); }
  int32_t* costs(int turn, int b);
  const uint8_t* chosen(int b, int t) const;

  // Makes all nodes before weight t start at no cost, or only node pins[b] of tile b.
  void start(int t, const int* pins);
  // Searches weights first to last - 1; from 256 on they are the first again.
  void advance(int first, int last);
  // The cheapest node of tile b after a search that ended before weight t.
  int cheapest(int b, int t);
  // Follows the best path of tile b from a node before weight `last` back to weight 0.
  // Returns the node before it; the states go to `states`.
  int trace(int b, int node, int last, uint16_t* states) const;

  const int words_;
  const int row_;  // the most nodes that any weight has
  const Tables& tables_;
  StepFunction steps_[2];                  // of even and odd weights
  int32_t weights_[kBatch][kTileWeights];  // in trellis order, fixed point
  int32_t least_[kBatch];
  int turn_ = 0;  // which half of costs_ was written last
  std::unique_ptr<int32_t[]> costs_;
  std::unique_ptr<uint8_t[]> chosen_;
};

}  // namespace exl3::encode
