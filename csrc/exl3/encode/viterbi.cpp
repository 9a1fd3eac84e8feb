// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/encode/viterbi.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>

#include "exl3/codec/trellis.h"

namespace exl3::encode {
namespace {

// Weights on either side of the ring's start that the first pass looks at.
int lookaround() {
  static int n = [] {
    const char* e = std::getenv("LOOK");
    return e ? std::atoi(e) : 128;
  }();
  return n;
}

int32_t to_fixed(float value) {
  constexpr float kUnits = static_cast<float>((1 << kValueFraction) / kValueStep);
  constexpr float kLimit = 32767 / kValueStep;
  const float units = std::nearbyint(value * kUnits);
  // Written so that a NaN becomes a number too.
  return kValueStep * static_cast<int32_t>(std::max(-kLimit, std::min(kLimit, units)));
}

// All values of a codebook, float32 [65536].
const float* value_table(Codebook codebook) {
  static std::vector<float> tables[kCodebooks];
  static std::once_flag built[kCodebooks];
  const int index = static_cast<int>(codebook);
  std::call_once(built[index], [&] {
    tables[index].resize(kStates);
    for (int s = 0; s < kStates; ++s) tables[index][s] = codebook_value(codebook, s);
  });
  return tables[index].data();
}

// The same for a step that takes in `in` bits; see Step::table.
const int32_t* step_table(Codebook codebook, int in) {
  constexpr int kMaxIn = 8;
  static std::vector<int32_t> tables[kCodebooks][kMaxIn + 1];
  static std::once_flag built[kCodebooks][kMaxIn + 1];
  const int index = static_cast<int>(codebook);
  std::vector<int32_t>& table = tables[index][in];
  std::call_once(built[index][in], [&] {
    const float* values = value_table(codebook);
    table.resize(kStates);
    for (int i = 0; i < kStates; ++i) {
      table[i] = to_fixed(values[table_state(i, tier().lanes, in)]) & 0xFFFF;
    }
  });
  return table.data();
}

}  // namespace

TileEncoder::TileEncoder(int words, Codebook codebook)
    : words_(words),
      codebook_(codebook),
      stride_(1 << (kStateBits - fresh_bits(words, 0))),
      values_(value_table(codebook)),
      costs_(new int32_t[2 * kBatch * stride_]),
      chosen_(new uint8_t[kBatch * kTileWeights * static_cast<size_t>(stride_)]) {
  for (int odd = 0; odd < 2; ++odd) {
    const int in = fresh_bits(words, odd), out = fresh_bits(words, odd + 1);
    steps_[odd] = tier().step(in, out);
    tables_[odd] = step_table(codebook, in);
  }
}

int TileEncoder::node_bits(int t) const { return kStateBits - fresh_bits(words_, t); }

void TileEncoder::start(int t, int pin[]) {
  const int in = fresh_bits(words_, t), out = fresh_bits(words_, t + 1);
  for (int b = 0; b < kBatch; ++b) {
    int32_t* costs = costs_.get() + (turn_ * kBatch + b) * stride_;
    for (int node = 0; node < 1 << node_bits(t); ++node) {
      const bool free = pin == nullptr || pin[b] == node;
      costs[node] = (free ? 0 : kCostLimit) | node_tag(node, in, out);
    }
    least_[b] = 0;
  }
}

void TileEncoder::advance(int first, int last) {
  Step step;
  for (int i = first; i < last; ++i) {
    const int t = i & (kTileWeights - 1);
    step.table = tables_[t & 1];
    for (int b = 0; b < kBatch; ++b) {
      step.weight[b] = weights_[b][t];
      step.before[b] = costs_.get() + (turn_ * kBatch + b) * stride_;
      step.after[b] = costs_.get() + ((turn_ ^ 1) * kBatch + b) * stride_;
      step.chosen[b] =
          chosen_.get() + (b * kTileWeights + t) * static_cast<size_t>(stride_);
      step.least[b] = least_[b];
    }
    steps_[t & 1](step);
    std::copy(step.least, step.least + kBatch, least_);
    turn_ ^= 1;
  }
}

int TileEncoder::trace(int b, int node, int last, uint16_t* states) const {
  for (int t = last - 1; t >= 0; --t) {
    const int bits = node_bits(t + 1);
    const uint8_t* chosen =
        chosen_.get() + (b * kTileWeights + t) * static_cast<size_t>(stride_);
    const int q = chosen[node] & ((1 << (kStateBits - bits)) - 1);
    const int state = q << bits | node;
    if (states) states[t] = static_cast<uint16_t>(state);
    node = state >> fresh_bits(words_, t);
  }
  return node;
}

void TileEncoder::encode(const float* tiles, int count, uint16_t* packed,
                         float* values) {
  for (int b = 0; b < kBatch; ++b) {
    // A batch that is not full searches its last tile more than once.
    const float* tile = tiles + std::min(b, count - 1) * kTileWeights;
    for (int t = 0; t < kTileWeights; ++t)
      weights_[b][t] = to_fixed(tile[tile_index(t)]);
  }

  // First pass: the node where the ring is cut, on the best path through the weights
  // around the cut.
  int pin[kBatch];
  start(kTileWeights - lookaround(), nullptr);
  advance(kTileWeights - lookaround(), kTileWeights + lookaround());
  for (int b = 0; b < count; ++b) {
    const int32_t* costs = costs_.get() + (turn_ * kBatch + b) * stride_;
    const int node =
        std::min_element(costs, costs + (1 << node_bits(lookaround()))) - costs;
    pin[b] = trace(b, node, lookaround(), nullptr);
  }
  for (int b = count; b < kBatch; ++b) pin[b] = pin[count - 1];

  // Second pass: the best path that starts and ends at that node.
  start(0, pin);
  advance(0, kTileWeights);
  for (int b = 0; b < count; ++b) {
    uint16_t states[kTileWeights];
    trace(b, pin[b], kTileWeights, states);
    uint16_t* tile = packed + b * words_;
    pack_states(states, words_, tile);
    for (int t = 0; t < kTileWeights; ++t) {
      values[b * kTileWeights + tile_index(t)] =
          values_[trellis_state(tile, words_, t)];
    }
  }
}

}  // namespace exl3::encode
