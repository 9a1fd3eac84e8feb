// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/encode/viterbi.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace exl3::encode {
namespace {

// The first pass goes once around the ring. A shorter one finds worse nodes to cut at:
// half of it costs 0.7% more error at 3 bits, and twice as much saves only 0.2%.
constexpr int kHalf = kTileWeights / 2;

// int16 units of the value 1. With 2^12, values up to 8 count in full and the step is
// 2^-10. From 5 bits on that would be coarse against the error, and weights scaled for
// so many bits stay below 4, the end of the codebooks.
float value_units(int words) { return words < 80 ? 1 << 12 : 1 << 13; }

int32_t to_fixed(float value, float units) {
  constexpr float kLimit = 32767 / kValueStep;
  const float steps = std::nearbyint(value * units / kValueStep);
  // In this order, a NaN becomes a number too.
  return kValueStep * static_cast<int32_t>(std::max(-kLimit, std::min(kLimit, steps)));
}

}  // namespace

struct Tables {
  std::vector<float> values;         // of each state
  std::vector<int32_t> of_steps[2];  // Step::table of even and odd weights

  Tables(int words, Codebook codebook, int lanes) : values(kStates) {
    for (int s = 0; s < kStates; ++s) values[s] = codebook_value(codebook, s);
    const float units = value_units(words);
    for (int odd = 0; odd < 2; ++odd) {
      const int in = fresh_bits(words, odd), out = fresh_bits(words, odd + 1);
      for (int i = 0; i < kStates; ++i) {
        const float value = values[table_state(i, lanes, in, out)];
        of_steps[odd].push_back(to_fixed(value, units) & 0xFFFF);
      }
    }
  }
};

namespace {

// Made once, since the encoder of one row of tiles may be gone before they would be.
const Tables& find_tables(int words, Codebook codebook, int lanes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, Codebook, int>, Tables> all;
  const std::lock_guard<std::mutex> lock(mutex);
  return all.try_emplace({words, codebook, lanes}, words, codebook, lanes)
      .first->second;
}

}  // namespace

TileEncoder::TileEncoder(int words, Codebook codebook, Tier tier)
    : words_(words),
      row_(1 << (kStateBits - fresh_bits(words, 0))),
      tables_(find_tables(words, codebook, tier.lanes)),
      costs_(new int32_t[2 * kBatch * (row_ + kGap)]),
      chosen_(new uint8_t[static_cast<size_t>(kBatch) * kTileWeights * row_]) {
  for (int odd = 0; odd < 2; ++odd) {
    steps_[odd] = tier.step(fresh_bits(words, odd), fresh_bits(words, odd + 1));
  }
}

int32_t* TileEncoder::costs(int turn, int b) {
  return costs_.get() + (turn * kBatch + b) * (row_ + kGap);
}

const uint8_t* TileEncoder::chosen(int b, int t) const {
  return chosen_.get() + static_cast<size_t>(b * kTileWeights + t) * row_;
}

void TileEncoder::start(int t, const int* pins) {
  const int in = fresh_bits(words_, t), out = fresh_bits(words_, t + 1);
  for (int b = 0; b < kBatch; ++b) {
    int32_t* cost = costs(turn_, b);
    for (int node = 0; node < 1 << node_bits(t); ++node) {
      const bool open = pins == nullptr || pins[b] == node;
      cost[node] = (open ? 0 : kCostLimit) | node_tag(node, in, out);
    }
    least_[b] = 0;
  }
}

void TileEncoder::advance(int first, int last) {
  Step step;
  for (int i = first; i < last; ++i) {
    const int t = i % kTileWeights;
    step.table = tables_.of_steps[t % 2].data();
    for (int b = 0; b < kBatch; ++b) {
      step.weight[b] = weights_[b][t];
      step.before[b] = costs(turn_, b);
      step.after[b] = costs(turn_ ^ 1, b);
      step.chosen[b] = const_cast<uint8_t*>(chosen(b, t));
      step.least[b] = least_[b];
    }
    steps_[t % 2](step);
    std::copy(step.least, step.least + kBatch, least_);
    turn_ ^= 1;
  }
}

int TileEncoder::cheapest(int b, int t) {
  const int32_t* cost = costs(turn_, b);
  return static_cast<int>(std::min_element(cost, cost + (1 << node_bits(t))) - cost);
}

int TileEncoder::trace(int b, int node, int last, uint16_t* states) const {
  for (int t = last - 1; t >= 0; --t) {
    const int bits = node_bits(t + 1);
    const int q = chosen(b, t)[node] & ((1 << (kStateBits - bits)) - 1);
    states[t] = static_cast<uint16_t>(q << bits | node);
    node = states[t] >> fresh_bits(words_, t);
  }
  return node;
}

void TileEncoder::encode(const float* tiles, int count, uint16_t* packed,
                         float* values) {
  for (int b = 0; b < kBatch; ++b) {
    // A batch that is not full searches its last tile more than once.
    const float* tile = tiles + std::min(b, count - 1) * kTileWeights;
    for (int t = 0; t < kTileWeights; ++t)
      weights_[b][t] = to_fixed(tile[tile_index(t)], value_units(words_));
  }
  uint16_t states[kTileWeights];

  // First pass: where to cut the ring. The best path through the last half and then the
  // first, wherever it starts and ends, passes a node between them.
  int pins[kBatch];
  start(kHalf, nullptr);
  advance(kHalf, kTileWeights + kHalf);
  for (int b = 0; b < kBatch; ++b)
    pins[b] = trace(b, cheapest(b, kHalf), kHalf, states);

  // Second pass: the best path that starts and ends at that node.
  start(0, pins);
  advance(0, kTileWeights);
  for (int b = 0; b < count; ++b) {
    trace(b, pins[b], kTileWeights, states);
    uint16_t* tile = packed + b * words_;
    pack_states(states, words_, tile);
    // Decoded anew, so that whatever the path, these are the values of what is packed.
    for (int t = 0; t < kTileWeights; ++t) {
      values[b * kTileWeights + tile_index(t)] =
          tables_.values[trellis_state(tile, words_, t)];
    }
  }
}

}  // namespace exl3::encode
