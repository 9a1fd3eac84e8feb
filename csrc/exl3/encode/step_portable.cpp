// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The trellis search without intrinsics; what the other tiers are tested against.

#include "exl3/encode/step.h"

namespace exl3::encode {
namespace {

struct Portable {
  static constexpr int kLanes = 8;
  struct Int {
    int32_t lane[kLanes];
  };

  template <class F>
  static Int each(F f) {
    Int result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = f(i);
    return result;
  }

  static Int broadcast(int32_t x) {
    return each([&](int) { return x; });
  }
  static Int load(const int32_t* p) {
    return each([&](int i) { return p[i]; });
  }
  static void store(int32_t* p, Int a) {
    for (int i = 0; i < kLanes; ++i) p[i] = a.lane[i];
  }
  static void store_bytes(uint8_t* p, Int a) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(a.lane[i]);
  }
  // The predecessors from p on, again and again.
  template <int kIn>
  static Int repeat(const int32_t* p) {
    return each([&](int i) { return p[i % predecessors(kLanes, kIn)]; });
  }
  // Lanes in the order of their nodes.
  template <int kIn>
  static Int in_order(Int a) {
    Int result;
    for (int i = 0; i < kLanes; ++i) result.lane[lane_node(i, kLanes, kIn)] = a.lane[i];
    return result;
  }
  // Tags of the nodes from `node` on.
  template <int kShift>
  static Int tags(int node) {
    return each([&](int i) { return (node + i) >> kShift & kTagMask; });
  }
  // Difference of the int16 in the low halves, saturated.
  static Int difference(Int a, Int b) {
    return each([&](int i) {
      const int d = static_cast<int16_t>(a.lane[i]) - static_cast<int16_t>(b.lane[i]);
      return d < -32768 ? -32768 : d > 32767 ? 32767 : d;
    });
  }
  static Int add_square(Int sum, Int d) {
    return each([&](int i) { return sum.lane[i] + d.lane[i] * d.lane[i]; });
  }
  static Int subtract(Int a, Int b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Int min(Int a, Int b) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  // x where a < b, else y.
  static Int choose_less(Int a, Int b, Int x, Int y) {
    return each([&](int i) { return a.lane[i] < b.lane[i] ? x.lane[i] : y.lane[i]; });
  }
  // `a` with the tag bits of `tag`.
  static Int insert(Int a, Int tag) {
    return each(
        [&](int i) { return (a.lane[i] & ~kTagMask) | (tag.lane[i] & kTagMask); });
  }
  static int32_t least(Int a) {
    int32_t result = a.lane[0];
    for (int i = 1; i < kLanes; ++i) result = a.lane[i] < result ? a.lane[i] : result;
    return result;
  }
};

}  // namespace

Tier portable_tier() { return {"portable", Portable::kLanes, find_step<Portable>}; }

}  // namespace exl3::encode
