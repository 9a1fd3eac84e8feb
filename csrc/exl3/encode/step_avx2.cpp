// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The trellis search with AVX2. CMakeLists.txt compiles this file for it; only
// tiers.cpp calls it.

#if defined(__x86_64__)

#include <immintrin.h>

#include "exl3/encode/step.h"

namespace exl3::encode {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  using Int = __m256i;

  static Int broadcast(int32_t x) { return _mm256_set1_epi32(x); }
  static Int load(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const Int*>(p));
  }
  static void store(int32_t* p, Int a) {
    _mm256_storeu_si256(reinterpret_cast<Int*>(p), a);
  }
  static void store_bytes(uint8_t* p, Int a) {
    // The low byte of each int32 to the front of each half.
    const Int front = _mm256_shuffle_epi8(
        a,
        _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,
                         4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(front),
                                             _mm256_extracti128_si256(front, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes);
  }

  template <int kIn>
  static Int repeat(const int32_t* p) {
    if constexpr (kIn == 1) {
      return _mm256_broadcastsi128_si256(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    } else if constexpr (kIn == 2) {
      return _mm256_broadcastq_epi64(
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    } else {
      return _mm256_set1_epi32(*p);
    }
  }

  template <int kIn>
  static Int in_order(Int a) {
    if constexpr (predecessors(kLanes, kIn) == 1) return a;
    alignas(32) static constexpr auto kFrom = [] {
      struct {
        int32_t lane[kLanes];
      } from{};
      for (int i = 0; i < kLanes; ++i) from.lane[lane_node(i, kLanes, kIn)] = i;
      return from;
    }();
    return _mm256_permutevar8x32_epi32(a, load(kFrom.lane));
  }

  template <int kShift>
  static Int tags(int node) {
    if constexpr ((1 << kShift) >= kLanes) return _mm256_set1_epi32(node >> kShift);
    const Int lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_set1_epi32(node), lane), kShift);
  }

  static Int difference(Int a, Int b) { return _mm256_subs_epi16(a, b); }
  static Int add_square(Int sum, Int d) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(d, d));
  }
  static Int subtract(Int a, Int b) { return _mm256_sub_epi32(a, b); }
  static Int min(Int a, Int b) { return _mm256_min_epi32(a, b); }
  static Int choose_less(Int a, Int b, Int x, Int y) {
    return _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi32(b, a));
  }
  static Int insert(Int a, Int tag) {
    const Int mask = _mm256_set1_epi32(kTagMask);
    return _mm256_or_si256(_mm256_andnot_si256(mask, a), _mm256_and_si256(mask, tag));
  }
  static int32_t least(Int a) {
    __m128i m =
        _mm_min_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_min_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_min_epi32(m, _mm_shuffle_epi32(m, 0xB1));
    return _mm_cvtsi128_si32(m);
  }
};

}  // namespace

Tier avx2_tier() { return {Avx2::kLanes, find_step<Avx2>}; }

}  // namespace exl3::encode

#endif
