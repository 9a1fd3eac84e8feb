// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The encoder of tiles: the ring of states whose values are nearest to 256 weights.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "exl3/codec/codebook.h"
#include "exl3/encode/tiers.h"

namespace exl3::encode {

// Encodes tiles one batch after another, in memory of its own: one for each thread.
class TileEncoder {
 public:
  // `words` and `codebook` are legal, see legal_words.
  TileEncoder(int words, Codebook codebook);

  // Encodes 1 to kBatch tiles.
  //   tiles   [count, 256] weights, row-major 16 x 16
  //   packed  [count, words] out
  //   values  [count, 256] out: the weights that `packed` decodes to, row-major
  void encode(const float* tiles, int count, uint16_t* packed, float* values);

 private:
  int node_bits(int t) const;    // of the nodes before weight t
  void start(int t, int pin[]);  // costs before weight t; pin -1: any node is free
  void advance(int first, int last);
  // Traces weights last - 1 to 0 back from a node, and returns the node before 0.
  int trace(int b, int node, int last, uint16_t* states) const;

  const int words_;
  const Codebook codebook_;
  int stride_;                    // nodes of a weight's row of history, at most
  const float* values_;           // [65536]
  StepFunction steps_[2];         // of even and odd weights
  const int32_t* tables_[2];      // [65536] each
  int32_t weights_[kBatch][256];  // in trellis order, fixed point
  int32_t least_[kBatch];
  // Costs [2, kBatch, stride], used in turn; chosen q [kBatch, 256, stride].
  std::unique_ptr<int32_t[]> costs_;
  std::unique_ptr<uint8_t[]> chosen_;
  int turn_ = 0;
};

}  // namespace exl3::encode
