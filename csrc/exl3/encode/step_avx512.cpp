// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The trellis search with AVX-512 (F, BW and VNNI): three instructions of arithmetic
// for 16 states. CMakeLists.txt compiles this file for these; only tiers.cpp calls it.

#if defined(__x86_64__)

#include <immintrin.h>

#include "exl3/encode/step.h"

namespace exl3::encode {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  using Int = __m512i;

  static Int broadcast(int32_t x) { return _mm512_set1_epi32(x); }
  static Int load(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store(int32_t* p, Int a) { _mm512_storeu_si512(p, a); }
  static void store_bytes(uint8_t* p, Int a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }

  template <int kIn>
  static Int repeat(const int32_t* p) {
    if constexpr (kIn == 1) {
      return _mm512_broadcast_i64x4(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    } else if constexpr (kIn == 2) {
      return _mm512_broadcast_i32x4(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    } else if constexpr (kIn == 3) {
      return _mm512_broadcastq_epi64(
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    } else {
      return _mm512_set1_epi32(*p);
    }
  }

  template <int kIn>
  static Int in_order(Int a) {
    if constexpr (predecessors(kLanes, kIn) == 1) return a;
    alignas(64) static constexpr auto kFrom = [] {
      struct {
        int32_t lane[kLanes];
      } from{};
      for (int i = 0; i < kLanes; ++i) from.lane[lane_node(i, kLanes, kIn)] = i;
      return from;
    }();
    return _mm512_permutexvar_epi32(_mm512_load_si512(kFrom.lane), a);
  }

  template <int kShift>
  static Int tags(int node) {
    if constexpr ((1 << kShift) >= kLanes) return _mm512_set1_epi32(node >> kShift);
    const Int lane =
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_set1_epi32(node), lane), kShift);
  }

  static Int difference(Int a, Int b) { return _mm512_subs_epi16(a, b); }
  static Int add_square(Int sum, Int d) { return _mm512_dpwssd_epi32(sum, d, d); }
  static Int subtract(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  static Int min(Int a, Int b) { return _mm512_min_epi32(a, b); }
  static Int choose_less(Int a, Int b, Int x, Int y) {
    return _mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(a, b), y, x);
  }
  static Int insert(Int a, Int tag) {
    // Bits of `tag` where the mask is set, else of `a`.
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(kTagMask), tag, a, 0xCA);
  }
  static int32_t least(Int a) { return _mm512_reduce_min_epi32(a); }
};

}  // namespace

Tier avx512_tier() { return {Avx512::kLanes, find_step<Avx512>}; }

}  // namespace exl3::encode

#endif
