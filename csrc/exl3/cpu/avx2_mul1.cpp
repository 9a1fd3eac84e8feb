// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The AVX2 kernel for mul1 with activations in 16 bits.

#include "exl3/cpu/avx2.h"

#if defined(__x86_64__)

#include <algorithm>
#include <cmath>

#include "exl3/cpu/avx2_decode.h"
#include "exl3/cpu/integer_rows.h"
#include "exl3/cpu/mul1.h"

namespace exl3::cpu {
namespace {

constexpr int kLargestActivation = 32767;

EXL3_AVX2 void pack(const float* x, int64_t k, int64_t row, int64_t rows,
                    std::byte* packed) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 sizes = _mm256_setzero_ps();
  __m256 finite = _mm256_setzero_ps();  // NaN if any value is infinite or NaN
  for (int64_t i = 0; i < k; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    sizes = _mm256_max_ps(sizes, _mm256_andnot_ps(sign, v));
    finite = _mm256_fmadd_ps(v, _mm256_setzero_ps(), finite);
  }
  float lanes[2][8];
  _mm256_storeu_ps(lanes[0], sizes);
  _mm256_storeu_ps(lanes[1], finite);
  const float largest = *std::max_element(lanes[0], lanes[0] + 8);
  float poison = 0.0f;
  for (const float lane : lanes[1]) poison += lane;

  const float step = largest / kLargestActivation;
  const __m256 inverse =
      _mm256_set1_ps(largest > 0 ? kLargestActivation / largest : 0.0f);
  int16_t* out = integer_row(packed, rows, k, row);
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < k; i += kTileSide) {
    const __m256i low =
        _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
    const __m256i high =
        _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), inverse));
    sums = _mm256_add_epi32(sums, _mm256_add_epi32(low, high));
    // 0 1 2 3 8 9 10 11 | 4 5 6 7 12 13 14 15, the order of a vector of sums
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_packs_epi32(low, high));
  }
  int32_t totals[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(totals), sums);
  int64_t total = 0;
  for (const int32_t lane : totals) total += lane;
  affine_of(packed, row) = {step * kMul1Scale + poison,
                            step * kMul1Offset * static_cast<float>(total)};
}

struct Integer {
  using Weight = int16_t;
  using Activation = int16_t;
  static constexpr int64_t kTiles = 16;  // 8 KiB
  static constexpr int kRows = 2;        // as many as 16 registers hold sums for
  // Each sum of 32 bits takes four products of a tile.
  static_assert(integers_hold(4 * kTiles, kMaxByteSum, kLargestActivation));

  EXL3_AVX2 static void decode(const uint16_t* tiles, int words, int64_t count,
                               int16_t* block) {
    for_states(tiles, words, count,
               [block](int64_t load, __m256i first, __m256i second) EXL3_AVX2 {
                 const __m256i sums =
                     _mm256_packs_epi32(byte_sums(hash<Codebook::kMul1>(first)),
                                        byte_sums(hash<Codebook::kMul1>(second)));
                 _mm256_store_si256(reinterpret_cast<__m256i*>(block + 16 * load),
                                    sums);
               });
  }

  template <int kRows>
  EXL3_AVX2 static void multiply(const int16_t* block, int64_t tiles, const int16_t* x,
                                 int64_t x_stride, float* y, int64_t y_stride) {
    for (int half = 0; half < kHalves; ++half) {
      __m256i sums[kRows][kGroups];
      for (auto& row : sums) {
        for (__m256i& sum : row) sum = _mm256_setzero_si256();
      }
      for (int64_t i = 0; i < kQuarters * tiles; ++i) {
        __m256i values[kRows];
        for (int row = 0; row < kRows; ++row) {
          values[row] = _mm256_broadcastsi128_si256(_mm_loadu_si128(
              reinterpret_cast<const __m128i*>(x + row * x_stride + 8 * i)));
        }
        const int16_t* w =
            block + i / kQuarters * kTileWeights + i % kQuarters * kTileSide;
        for (int group = 0; group < kGroups; ++group) {
          __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(
              w + kQuarters * kTileSide * (kGroups * half + group)));
          for (int row = 0; row < kRows; ++row) {
            sums[row][group] = _mm256_add_epi32(sums[row][group],
                                                _mm256_madd_epi16(bytes, values[row]));
          }
        }
      }
      for (int row = 0; row < kRows; ++row) {
        __m256 floats[kGroups];
        for (int group = 0; group < kGroups; ++group) {
          floats[group] = _mm256_cvtepi32_ps(sums[row][group]);
        }
        float* to = y + row * y_stride + 8 * half;
        _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), sum_columns(floats)));
      }
    }
  }
};

}  // namespace

const Kernel kAvx2Mul1 = integer_kernel<Integer>("avx2 int16", pack);

}  // namespace exl3::cpu

#endif
