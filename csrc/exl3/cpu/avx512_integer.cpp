// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The AVX-512 kernels with integer activations: for mul1, and, with AVX512-FP16, for
// the other codebooks.

#include "exl3/cpu/avx512.h"

#if defined(__x86_64__)

#include "exl3/cpu/avx512_quantize.h"
#include "exl3/cpu/avx512fp16_decode.h"
#include "exl3/cpu/integer_rows.h"

namespace exl3::cpu {
namespace {

template <typename Scheme>
void pack(const float* x, int64_t k, int64_t row, int64_t rows, std::byte* packed) {
  affine_of(packed, row) =
      quantize_row(x, k, Scheme::kLargest, Scheme::kScale, Scheme::kOffset,
                   integer_row(packed, rows, k, row));
}

// What both have: rows of 16-bit products.
struct Integers {
  using Weight = int16_t;
  using Activation = int16_t;
  static constexpr int kRows = 3;  // as many as 32 registers hold sums for

  template <int kRows>
  EXL3_AVX512 static void multiply(const int16_t* block, int64_t tiles,
                                   const int16_t* x, int64_t x_stride, float* y,
                                   int64_t y_stride) {
    __m512i sums[kRows][kVectors];
    for (auto& row : sums) {
      for (__m512i& sum : row) sum = _mm512_setzero_si512();
    }
    for (int64_t i = 0; i < tiles; ++i) {
      __m512i values[kRows];
      for (int row = 0; row < kRows; ++row) {
        values[row] = _mm512_broadcast_i64x4(_mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(x + row * x_stride + kTileSide * i)));
      }
      for (int vector = 0; vector < kVectors; ++vector) {
        const __m512i bytes = _mm512_load_si512(block + i * kTileWeights + 32 * vector);
        for (int row = 0; row < kRows; ++row) {
          sums[row][vector] =
              _mm512_dpwssd_epi32(sums[row][vector], bytes, values[row]);
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      __m512 floats[kVectors];
      for (int vector = 0; vector < kVectors; ++vector) {
        floats[vector] = _mm512_cvtepi32_ps(sums[row][vector]);
      }
      float* to = y + row * y_stride;
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum_columns(floats)));
    }
  }
};

struct Mul1 : Integers {
  static constexpr int64_t kTiles = 32;  // 16 KiB
  static constexpr int kLargest = 32767;
  static constexpr float kScale = kMul1Scale;
  static constexpr float kOffset = kMul1Offset;
  // Each sum of 32 bits takes two products of a tile.
  static_assert(integers_hold(2 * kTiles, kMaxByteSum, kLargest));

  EXL3_AVX512 static void decode(const uint16_t* tiles, int words, int64_t count,
                                 int16_t* block) {
    for_states(tiles, words, count, [block](int64_t vector, __m512i state) EXL3_AVX512 {
      _mm512_store_si512(block + 32 * vector, byte_sums(hash<Codebook::kMul1>(state)));
    });
  }
};

// 3inst and mcg as integers of 2^-12. The two halves of a hash are added as the format
// does, in fp16; only values below 1/4 lose a bit to the integers.
template <Codebook kCodebook>
struct Halves : Integers {
  static constexpr int64_t kTiles = 8;
  static constexpr int kLargest = 8191;
  static constexpr float kScale = 1.0f / 4096;
  static constexpr float kOffset = 0.0f;
  static_assert(integers_hold(2 * kTiles, 4 * 4096, kLargest));

  EXL3_AVX512FP16 static void decode(const uint16_t* tiles, int words, int64_t count,
                                     int16_t* block) {
    // The format's constant, with exponents 24 to 27 instead of 12 to 15.
    constexpr uint16_t kConstant = 0x3B60 ^ 0x5000;
    for_states(tiles, words, count,
               [block](int64_t vector, __m512i state) EXL3_AVX512FP16 {
                 const __m512h sum = add_halves<kConstant>(hash<kCodebook>(state));
                 _mm512_store_si512(block + 32 * vector, _mm512_cvtph_epi16(sum));
               });
  }
};

}  // namespace

const Kernel kAvx512Mul1 = integer_kernel<Mul1>("avx512 int16", pack<Mul1>);

const Kernel kAvx512Fp16[kCodebooks] = {
    integer_kernel<Halves<Codebook::k3Inst>>("avx512fp16",
                                             pack<Halves<Codebook::k3Inst>>),
    integer_kernel<Halves<Codebook::kMcg>>("avx512fp16", pack<Halves<Codebook::kMcg>>),
    integer_kernel<Mul1>("avx512 int16", pack<Mul1>),
};

}  // namespace exl3::cpu

#endif
