// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// One step of the trellis search: the encoder's inner loop, once for every tier.
//
// Costs are fixed-point integers, so that all tiers choose the same states. The search
// before weight t stands at one of the nodes that its states begin with:
//
//   state of t    | node before t: 16 - kIn bits  | fresh: kIn bits |
//                 | q: kOut bits | node after t: 16 - kOut bits     |
//
// A node has 2^kOut states that end in it, one for each q. Each costs what the node
// before has cost, and the squared distance of the state's value from the weight.
// The low bits of a node's cost are free to hold the node's own q at the next step, so
// that one minimum finds both the cheapest predecessor and its name.
#pragma once

#include <cstdint>

namespace exl3::encode {

// Tiles that are searched together, since they share the reads of the table.
constexpr int kBatch = 2;

// Bits of a cost that name the predecessor. Values are multiples of 2^(kTagBits / 2)
// and squares of 2^kTagBits, so sums leave the tag alone.
constexpr int kTagBits = 4;
constexpr int kTags = 1 << kTagBits;
constexpr int32_t kTagMask = kTags - 1;

// Values are int16, in multiples of 4. Differences of theirs saturate at 2^15 and
// squares at 2^30. A node that costs that much more than the cheapest is never on the
// best path of a tile in the codebook's range, so costs may saturate there too; and
// 2^30 + 2^30 - 1 fits.
constexpr int32_t kValueStep = 1 << (kTagBits / 2);
constexpr int32_t kCostLimit = (1 << 30) - kTags;

struct Step {
  // Values of all states [65536], int16 in the low halves of int32, in the order in
  // which the step reads them; see table_state.
  const int32_t* table;
  int32_t weight[kBatch];         // as a value in the table
  const int32_t* before[kBatch];  // costs [2^(16 - kIn)]
  int32_t* after[kBatch];         // costs [2^(16 - kOut)], less `least`
  uint8_t* chosen[kBatch];  // [2^(16 - kOut)] q of each node, in the low kOut bits
  int32_t least[kBatch];    // in: least cost before; out: least cost after
};

using StepFunction = void (*)(Step&);

// The tag of a node before a step that takes in `in` bits and puts out `out`.
constexpr int32_t node_tag(int node, int in, int out) {
  return (node >> (16 - in - out)) & kTagMask;
}

// A vector of costs after a step holds kLanes consecutive nodes. Their predecessors for
// one q are kLanes / 2^kIn consecutive nodes (or one), each 2^kIn times. A load that
// repeats those is free, but has them in the order 0 1 0 1 ..., so the lanes of a
// vector are nodes in that order, the table is laid out in it, and only results are
// reordered.
constexpr int predecessors(int lanes, int in) {
  return (lanes >> in) > 1 ? lanes >> in : 1;
}

constexpr int lane_node(int lane, int lanes, int in) {
  const int period = predecessors(lanes, in);
  return period == 1 ? lane : (lane % period << in) + lane / period;
}

// The state whose value is entry i of a step's table: lanes in one vector, then the
// vectors of all q for the same nodes.
constexpr int table_state(int i, int lanes, int in, int out) {
  const int vector = i / lanes;
  const int q = vector % (1 << out);
  const int node = (vector >> out) * lanes + lane_node(i % lanes, lanes, in);
  return q << (16 - out) | node;
}

// The search with one instruction set.
struct Tier {
  int lanes;
  StepFunction (*step)(int in, int out);  // null where no rate has such a step
};

Tier portable_tier();
#if defined(__x86_64__)
Tier avx2_tier();
Tier avx512_tier();
#endif

// In an unnamed namespace, since each tier is compiled for another instruction set and
// must not share an instance with the next.
namespace {

template <class V, int kIn, int kOut>
void step(Step& s) {
  using Int = typename V::Int;
  constexpr int kNodes = 1 << (16 - kOut);
  constexpr int kLow = kOut < kTagBits ? 1 << kOut : kTags;  // q's that tags tell apart
  constexpr int kHigh = (1 << kOut) / kLow;
  constexpr int kTagShift = 16 - kOut - kIn;

  Int weight[kBatch], least_before[kBatch], least[kBatch];
  for (int b = 0; b < kBatch; ++b) {
    weight[b] = V::broadcast(s.weight[b] & 0xFFFF);
    least_before[b] = V::broadcast(s.least[b]);
    least[b] = V::broadcast(kCostLimit);
  }
  for (int node = 0; node < kNodes; node += V::kLanes) {
    Int best[kBatch], high[kBatch];
    for (int q_high = 0; q_high < kHigh; ++q_high) {
      Int group[kBatch];
#pragma GCC unroll 16
      for (int q_low = 0; q_low < kLow; ++q_low) {
        const int q = q_high * kLow + q_low;
        const Int value = V::load(s.table + (node << kOut) + q * V::kLanes);
        const int predecessor = (q << kTagShift) + (node >> kIn);
        for (int b = 0; b < kBatch; ++b) {
          const Int cost =
              V::add_square(V::template repeat<kIn>(s.before[b] + predecessor),
                            V::difference(value, weight[b]));
          group[b] = q_low == 0 ? cost : V::min(group[b], cost);
        }
      }
      for (int b = 0; b < kBatch; ++b) {
        if (q_high == 0) {
          best[b] = group[b];
          high[b] = V::broadcast(0);
        } else {
          high[b] =
              V::choose_less(group[b], best[b], V::broadcast(q_high * kTags), high[b]);
          best[b] = V::min(group[b], best[b]);
        }
      }
    }
    for (int b = 0; b < kBatch; ++b) {
      const Int found = V::template in_order<kIn>(best[b]);
      Int q = found;
      if constexpr (kHigh > 1) q = V::insert(V::template in_order<kIn>(high[b]), q);
      V::store_bytes(s.chosen[b] + node, q);
      const Int cost =
          V::min(V::subtract(found, least_before[b]), V::broadcast(kCostLimit));
      least[b] = V::min(least[b], cost);
      V::store(s.after[b] + node, V::insert(cost, V::template tags<kTagShift>(node)));
    }
  }
  for (int b = 0; b < kBatch; ++b) s.least[b] = V::least(least[b]) & ~kTagMask;
}

template <class V>
StepFunction find_step(int in, int out) {
  switch (in * 16 + out) {
#define EXL3_STEP(in, out) \
  case in * 16 + out:      \
    return step<V, in, out>;
    EXL3_STEP(1, 1)
    EXL3_STEP(2, 2)
    EXL3_STEP(3, 3)
    EXL3_STEP(4, 4)
    EXL3_STEP(5, 5)
    EXL3_STEP(6, 6)
    EXL3_STEP(7, 7)
    EXL3_STEP(8, 8)
    // 1.5, 2.5 and 3.5 bits
    EXL3_STEP(1, 2)
    EXL3_STEP(2, 1)
    EXL3_STEP(2, 3)
    EXL3_STEP(3, 2)
    EXL3_STEP(3, 4)
    EXL3_STEP(4, 3)
#undef EXL3_STEP
  }
  return nullptr;
}

}  // namespace
}  // namespace exl3::encode
