// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What the AVX-512 kernels share: states of the trellis, their values, and the order in
// which both lie in vectors. Only files of this tier include it.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined lanes of its own intrinsics for uninitialized variables.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "exl3/codec/trellis.h"
#include "exl3/cpu/by_words.h"
#include "exl3/cpu/mul1.h"

// On every function, not on the file: a function of a header that is compiled here for
// AVX-512 would else be the one that the linker keeps for everybody.
#define EXL3_AVX512 \
  __attribute__((   \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,fma,f16c")))

namespace exl3::cpu {
namespace {

// States of 32 weights in one vector of 16-bit elements. A tile is 4 groups of 8 lanes
// (of trellis order, 8 weights each), and each group is two vectors, of the first and
// the last four weights of its lanes. So a vector is 2 columns of 16 k:
//
//   group g, half h:  columns 2g + 8h and 2g + 8h + 1
//   16-bit elements:  column 2g + 8h:  k 0 8 1 9 2 10 ... 7 15, then the next column
//
// Even elements are k 0 to 7 and odd ones 8 to 15, so two vectors of 32-bit elements
// have k in order. vpermb puts the bytes that a lane needs into its quadword, the
// first ring byte on top; vpmultishiftqb takes any 8 bits of a quadword for each byte.
constexpr int kGroups = 4;
constexpr int kHalves = 2;
constexpr int kGroupLanes = 8;
constexpr int kVectors = kGroups * kHalves;  // of 32 weights, in a tile

struct Windows {
  alignas(64) uint8_t bytes[kHalves][64];
  alignas(64) uint8_t shifts[kHalves][64];
  int first_word[kHalves];   // of 32 bits, from the group's start; -1 looks back
  uint16_t loaded[kHalves];  // which of 16 words are read
};

constexpr int floor_divide(int a, int b) { return (a - (a < 0 ? b - 1 : 0)) / b; }

constexpr Windows make_windows(int words) {
  Windows windows{};
  for (int half = 0; half < kHalves; ++half) {
    const int first = floor_divide(end_bit(words, 4 * half) - kStateBits, 32);
    const int last = (end_bit(words, 8 * (kGroupLanes - 1) + 4 * half + 3) - 1) / 32;
    windows.first_word[half] = first;
    windows.loaded[half] = static_cast<uint16_t>((2u << (last - first)) - 1);
    for (int lane = 0; lane < kGroupLanes; ++lane) {
      const int weight = 8 * lane + 4 * half;
      const int top = floor_divide(end_bit(words, weight) - kStateBits, 8);
      for (int i = 0; i < 8; ++i) {
        // Ring byte b is byte b ^ 3 of memory, since words are little-endian.
        windows.bytes[half][8 * lane + 7 - i] =
            static_cast<uint8_t>(((top + i) ^ 3) - 4 * first);
      }
      constexpr int kOrder[4] = {0, 2, 1, 3};
      for (int i = 0; i < 4; ++i) {
        const int end = end_bit(words, weight + kOrder[i]) - 8 * top;
        windows.shifts[half][8 * lane + 2 * i] = static_cast<uint8_t>(64 - end);
        windows.shifts[half][8 * lane + 2 * i + 1] = static_cast<uint8_t>(72 - end);
      }
    }
  }
  return windows;
}

constexpr auto kWindows = by_words<make_windows>();

// Calls use(vector, states) for the 8 vectors of each tile, numbered through.
template <typename Use>
EXL3_AVX512 [[gnu::always_inline]] inline void for_states(const uint16_t* tiles,
                                                          int words, int64_t count,
                                                          Use use) {
  const Windows& windows = kWindows[words_index(words)];
  const auto* ring = reinterpret_cast<const char*>(tiles);
  const int group_bytes = words / 2;
  for (int64_t tile = 0; tile < count; ++tile, ring += 2 * words) {
    int32_t last;  // the word before the first one, since the tile is a ring
    std::memcpy(&last, ring + 2 * words - sizeof(last), sizeof(last));
    for (int group = 0; group < kGroups; ++group) {
      for (int half = 0; half < kHalves; ++half) {
        const char* from = ring + group * group_bytes + 4 * windows.first_word[half];
        const __mmask16 loaded = windows.loaded[half];
        const __m512i bits = group == 0 && windows.first_word[half] < 0
                                 ? _mm512_mask_loadu_epi32(_mm512_set1_epi32(last),
                                                           loaded & 0xFFFE, from)
                                 : _mm512_maskz_loadu_epi32(loaded, from);
        const __m512i lanes =
            _mm512_permutexvar_epi8(_mm512_load_si512(windows.bytes[half]), bits);
        use(kVectors * tile + kHalves * group + half,
            _mm512_multishift_epi64_epi8(_mm512_load_si512(windows.shifts[half]),
                                         lanes));
      }
    }
  }
}

struct Hash {
  __m512i low;   // 16 bits of each of 32 hashes
  __m512i high;  // the other 16
};

template <Codebook kCodebook>
EXL3_AVX512 inline Hash hash(__m512i state) {
  constexpr uint32_t kAdd = hash_state(kCodebook, 0);
  constexpr uint32_t kMultiplier = hash_state(kCodebook, 1) - kAdd;
  const __m512i low_factor = _mm512_set1_epi16(static_cast<int16_t>(kMultiplier));
  const __m512i high_factor =
      _mm512_set1_epi16(static_cast<int16_t>(kMultiplier >> 16));
  Hash z;
  z.low = _mm512_mullo_epi16(state, low_factor);
  z.high = _mm512_add_epi16(_mm512_mulhi_epu16(state, low_factor),
                            _mm512_mullo_epi16(state, high_factor));
  if constexpr (kAdd != 0) {
    const __m512i low_add = _mm512_set1_epi16(static_cast<int16_t>(kAdd));
    z.low = _mm512_add_epi16(z.low, low_add);
    const __mmask32 carry = _mm512_cmplt_epu16_mask(z.low, low_add);
    z.high =
        _mm512_add_epi16(z.high, _mm512_set1_epi16(static_cast<int16_t>(kAdd >> 16)));
    z.high = _mm512_mask_add_epi16(z.high, carry, z.high, _mm512_set1_epi16(1));
  }
  return z;
}

// The fp16 value in the upper half of each 32-bit element, after the codebook's mask
// and constant, as float. Its exponent is 12 to 15, so no case is special: three steps
// to the right put its fields where float has them, and one operation applies the
// mask, the constant and the difference of the exponents' biases.
EXL3_AVX512 inline __m512 upper_half(__m512i hash) {
  constexpr int32_t kMask = static_cast<int32_t>(0x81FFE000);
  constexpr int32_t kConstant = (0x3B60 << 13) + (112 << 23);
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(_mm512_srai_epi32(hash, 3), _mm512_set1_epi32(kMask),
                                _mm512_set1_epi32(kConstant), (0xF0 & 0xCC) ^ 0xAA));
}

EXL3_AVX512 inline __m512 round_to_half(__m512 value) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm512_cvtph_ps(_mm512_cvtps_ph(value, kNearest));
}

// The sum of each hash's four bytes, in 16 bits.
EXL3_AVX512 inline __m512i byte_sums(Hash z) {
  const __m512i ones = _mm512_set1_epi8(1);
  return _mm512_add_epi16(_mm512_maddubs_epi16(z.low, ones),
                          _mm512_maddubs_epi16(z.high, ones));
}

// The values of 32 states: k 0 to 7 of two columns, then k 8 to 15.
template <Codebook kCodebook, bool kExact>
EXL3_AVX512 inline void decode_values(__m512i state, __m512 (&out)[2]) {
  const Hash z = hash<kCodebook>(state);
  if constexpr (kCodebook == Codebook::kMul1) {
    const __m512i sums = byte_sums(z);
    const __m512i even = _mm512_and_si512(sums, _mm512_set1_epi32(0xFFFF));
    const __m512i odd = _mm512_srli_epi32(sums, 16);
    const __m512 scale = _mm512_set1_ps(kMul1Scale);
    const __m512 offset = _mm512_set1_ps(kMul1Offset);
    out[0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(even), scale, offset);
    out[1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(odd), scale, offset);
  } else {
    out[0] = _mm512_add_ps(upper_half(_mm512_slli_epi32(z.low, 16)),
                           upper_half(_mm512_slli_epi32(z.high, 16)));
    out[1] = _mm512_add_ps(upper_half(z.low), upper_half(z.high));
  }
  if constexpr (kExact) {
    out[0] = round_to_half(out[0]);
    out[1] = round_to_half(out[1]);
  }
}

// Sums each 8-element half of 8 vectors, of the columns above, and puts the sums into
// the columns' order.
EXL3_AVX512 inline __m512 sum_columns(const __m512 (&v)[kVectors]) {
  __m512 quarters[kGroups];
  for (int i = 0; i < kGroups; ++i) {
    const __m512 a = v[2 * i];
    const __m512 b = v[2 * i + 1];
    quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                                _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
  }
  __m512 pairs[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = quarters[2 * i];
    const __m512 b = quarters[2 * i + 1];
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  const __m512 sums =
      _mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], _MM_SHUFFLE(1, 0, 1, 0)),
                    _mm512_shuffle_ps(pairs[0], pairs[1], _MM_SHUFFLE(3, 2, 3, 2)));
  // Element 4 * (2 * half + odd column) + group.
  return _mm512_permutexvar_ps(
      _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), sums);
}

}  // namespace
}  // namespace exl3::cpu
