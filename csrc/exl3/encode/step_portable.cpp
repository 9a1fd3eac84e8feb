// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The trellis search without intrinsics; what the others are tested against.

#include <algorithm>
#include <cstring>

#include "exl3/encode/step.h"

namespace exl3::encode {
namespace {

// GCC's and Clang's own vectors, which any machine has instructions for.
struct Portable {
  static constexpr int kLanes = 4;
  using Int = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));

  static Int broadcast(int32_t x) { return Int{} + x; }
  static Int load(const int32_t* p) {
    Int a;
    std::memcpy(&a, p, sizeof(a));
    return a;
  }
  static void store(int32_t* p, const Int& a) { std::memcpy(p, &a, sizeof(a)); }
  static void store_bytes(uint8_t* p, const Int& a) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(a[i]);
  }
  // The predecessors from p on, again and again.
  template <int kIn>
  static Int repeat(const int32_t* p) {
    Int a;
    for (int i = 0; i < kLanes; ++i) a[i] = p[i % predecessors(kLanes, kIn)];
    return a;
  }
  // Lanes in the order of their nodes.
  template <int kIn>
  static Int in_order(const Int& a) {
    Int result;
    for (int i = 0; i < kLanes; ++i) result[lane_node(i, kLanes, kIn)] = a[i];
    return result;
  }
  // Tags of the nodes from `node` on.
  template <int kShift>
  static Int tags(int node) {
    return (Int{0, 1, 2, 3} + node) >> kShift;
  }
  // Difference of the int16 in the low halves, saturated.
  static Int difference(const Int& a, const Int& b) {
    const Int d = (a << 16 >> 16) - (b << 16 >> 16);
    return min(max(d, broadcast(-32768)), broadcast(32767));
  }
  static Int add_square(const Int& sum, const Int& d) { return sum + d * d; }
  static Int subtract(const Int& a, const Int& b) { return a - b; }
  static Int min(const Int& a, const Int& b) { return a < b ? a : b; }
  static Int max(const Int& a, const Int& b) { return a > b ? a : b; }
  // x where a < b, else y.
  static Int choose_less(const Int& a, const Int& b, const Int& x, const Int& y) {
    return a < b ? x : y;
  }
  // `a` with the tag bits of `tag`.
  static Int insert(const Int& a, const Int& tag) {
    return (a & ~kTagMask) | (tag & kTagMask);
  }
  static int32_t least(const Int& a) {
    int32_t result = a[0];
    for (int i = 1; i < kLanes; ++i) result = std::min(result, a[i]);
    return result;
  }
};

}  // namespace

Tier portable_tier() { return {Portable::kLanes, find_step<Portable>}; }

}  // namespace exl3::encode
