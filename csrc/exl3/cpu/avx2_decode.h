// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What the AVX2 kernels share: states of the trellis, their values, and the order in
// which both lie in vectors. Only files of this tier include it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "exl3/codec/trellis.h"
#include "exl3/cpu/by_words.h"

// On every function, not on the file: a function of a header that is compiled here for
// AVX2 would else be the one that the linker keeps for everybody.
#define EXL3_AVX2 __attribute__((target("avx2,fma,f16c")))

namespace exl3::cpu {
namespace {

// States of 8 weights in one vector of 32-bit elements, 4 k of 2 columns. A vector's
// halves are two lanes each (of trellis order, 8 weights):
//
//   half h, group g, quarter q, pair p:   lanes 8g + 2q, + 1  |  8g + 4 + 2q, + 1
//   low elements:    column 2g + 8h,      k 8p + 4q + 0 1 2 3
//   high elements:   column 2g + 8h + 1,  the same k
//
// Two lanes' four weights of a half lie in four words of 32 bits, which one load reads.
// vpshufb puts the three bytes of a window into its element, the first ring byte on
// top, and vpsrlvd moves the window down.
constexpr int kHalves = 2;
constexpr int kGroups = 4;
constexpr int kQuarters = 2;
constexpr int kPairs = 2;
constexpr int kLoads = kHalves * kGroups * kQuarters;

struct Windows {
  int8_t first_word[kLoads][2];  // of 32 bits; -1 is the tile's last word
  alignas(32) uint8_t bytes[kLoads][kPairs][32];
  alignas(32) uint32_t shifts[kLoads][kPairs][8];
};

constexpr int floor_divide(int a, int b) { return (a - (a < 0 ? b - 1 : 0)) / b; }

constexpr Windows make_windows(int words) {
  Windows windows{};
  for (int load = 0; load < kLoads; ++load) {
    const int half = load / (kGroups * kQuarters);
    const int group = load / kQuarters % kGroups;
    const int quarter = load % kQuarters;
    for (int side = 0; side < 2; ++side) {
      const int lane = 8 * group + 2 * quarter + 4 * side;
      int first = floor_divide(end_bit(words, 8 * lane + 4 * half) - kStateBits, 32);
      if (first > words / 2 - 4) first = words / 2 - 4;  // no load passes the tile
      windows.first_word[load][side] = static_cast<int8_t>(first);
      for (int pair = 0; pair < kPairs; ++pair) {
        for (int i = 0; i < 4; ++i) {
          const int weight = 8 * (lane + i / 2) + 4 * half + 2 * pair + i % 2;
          const int top = floor_divide(end_bit(words, weight) - kStateBits, 8);
          const int element = 4 * side + i;
          windows.shifts[load][pair][element] =
              static_cast<uint32_t>(32 - (end_bit(words, weight) - 8 * top));
          windows.bytes[load][pair][4 * element] = 0x80;  // zero
          for (int byte = 0; byte < 3; ++byte) {
            // Ring byte b is byte b ^ 3 of memory, since words are little-endian.
            windows.bytes[load][pair][4 * element + 3 - byte] =
                static_cast<uint8_t>(((top + byte) ^ 3) - 4 * first);
          }
        }
      }
    }
  }
  return windows;
}

constexpr auto kWindows = by_words<make_windows>();

EXL3_AVX2 inline __m128i load_words(const char* ring, int words, int first) {
  if (first >= 0) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(ring + 4 * first));
  }
  int32_t last;
  std::memcpy(&last, ring + 2 * words - sizeof(last), sizeof(last));
  const __m128i start = _mm_loadu_si128(reinterpret_cast<const __m128i*>(ring));
  return _mm_insert_epi32(_mm_slli_si128(start, 4), last, 0);
}

// Calls use(load, states of pair 0, states of pair 1) for the 16 loads of each tile,
// numbered through.
template <typename Use>
EXL3_AVX2 [[gnu::always_inline]] inline void for_states(const uint16_t* tiles,
                                                        int words, int64_t count,
                                                        Use use) {
  const Windows& windows = kWindows[words_index(words)];
  const auto* ring = reinterpret_cast<const char*>(tiles);
  const __m256i mask = _mm256_set1_epi32(0xFFFF);
  for (int64_t tile = 0; tile < count; ++tile, ring += 2 * words) {
    for (int load = 0; load < kLoads; ++load) {
      const int8_t* first = windows.first_word[load];
      const __m256i bits = _mm256_inserti128_si256(
          _mm256_castsi128_si256(load_words(ring, words, first[0])),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(ring + 4 * first[1])), 1);
      __m256i states[kPairs];
      for (int pair = 0; pair < kPairs; ++pair) {
        const auto* bytes = reinterpret_cast<const __m256i*>(windows.bytes[load][pair]);
        const auto* shifts =
            reinterpret_cast<const __m256i*>(windows.shifts[load][pair]);
        const __m256i window = _mm256_shuffle_epi8(bits, _mm256_load_si256(bytes));
        states[pair] = _mm256_and_si256(
            _mm256_srlv_epi32(window, _mm256_load_si256(shifts)), mask);
      }
      use(kLoads * tile + load, states[0], states[1]);
    }
  }
}

template <Codebook kCodebook>
EXL3_AVX2 inline __m256i hash(__m256i state) {
  constexpr uint32_t kAdd = hash_state(kCodebook, 0);
  constexpr uint32_t kMultiplier = hash_state(kCodebook, 1) - kAdd;
  const __m256i product =
      _mm256_mullo_epi32(state, _mm256_set1_epi32(static_cast<int32_t>(kMultiplier)));
  return _mm256_add_epi32(product, _mm256_set1_epi32(static_cast<int32_t>(kAdd)));
}

// The sum of each hash's four bytes.
EXL3_AVX2 inline __m256i byte_sums(__m256i hash) {
  const __m256i pairs = _mm256_maddubs_epi16(hash, _mm256_set1_epi8(1));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// Sums each half of 4 vectors, of groups 0 to 3, and puts the sums into the columns'
// order.
EXL3_AVX2 inline __m256 sum_columns(const __m256 (&v)[kGroups]) {
  const __m256 sums =
      _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  return _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

}  // namespace
}  // namespace exl3::cpu
