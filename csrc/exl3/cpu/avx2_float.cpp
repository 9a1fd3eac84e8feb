// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The AVX2 kernels with float activations.

#include "exl3/cpu/avx2.h"

#if defined(__x86_64__)

#include "exl3/cpu/avx2_decode.h"
#include "exl3/cpu/float_rows.h"
#include "exl3/cpu/mul1.h"

namespace exl3::cpu {
namespace {

// The fp16 value in the upper half of each element, after the codebook's mask and
// constant, as float. Its exponent is 12 to 15, so no case is special: three steps to
// the right put its fields where float has them, and the constant also holds the
// difference of the exponents' biases.
EXL3_AVX2 inline __m256 upper_half(__m256i hash) {
  constexpr int32_t kMask = static_cast<int32_t>(0x81FFE000);
  constexpr int32_t kConstant = (0x3B60 << 13) + (112 << 23);
  const __m256i fields =
      _mm256_and_si256(_mm256_srai_epi32(hash, 3), _mm256_set1_epi32(kMask));
  return _mm256_castsi256_ps(_mm256_xor_si256(fields, _mm256_set1_epi32(kConstant)));
}

template <Codebook kCodebook, bool kExact>
EXL3_AVX2 inline __m256 decode_values(__m256i state) {
  const __m256i z = hash<kCodebook>(state);
  __m256 value;
  if constexpr (kCodebook == Codebook::kMul1) {
    value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(byte_sums(z)),
                            _mm256_set1_ps(kMul1Scale), _mm256_set1_ps(kMul1Offset));
  } else {
    value = _mm256_add_ps(upper_half(_mm256_slli_epi32(z, 16)), upper_half(z));
  }
  if constexpr (kExact) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    value = _mm256_cvtph_ps(_mm256_cvtps_ph(value, kNearest));
  }
  return value;
}

template <Codebook kCodebook, bool kExact>
struct Float {
  using Weight = float;
  using Activation = float;
  static constexpr int64_t kTiles = 16;  // 16 KiB
  static constexpr int kRows = 3;        // as many as 16 registers hold sums for

  EXL3_AVX2 static void decode(const uint16_t* tiles, int words, int64_t count,
                               float* block) {
    for_states(tiles, words, count,
               [block](int64_t load, __m256i first, __m256i second) EXL3_AVX2 {
                 _mm256_store_ps(block + 16 * load,
                                 decode_values<kCodebook, kExact>(first));
                 _mm256_store_ps(block + 16 * load + 8,
                                 decode_values<kCodebook, kExact>(second));
               });
  }

  template <int kRows>
  EXL3_AVX2 static void multiply(const float* block, int64_t tiles, const float* x,
                                 int64_t x_stride, float* y, int64_t y_stride) {
    for (int half = 0; half < kHalves; ++half) {
      __m256 sums[kRows][kGroups];
      for (auto& row : sums) {
        for (__m256& sum : row) sum = _mm256_setzero_ps();
      }
      for (int64_t tile = 0; tile < tiles; ++tile) {
        for (int quad = 0; quad < kQuarters * kPairs; ++quad) {
          const int first = 4 * (quad / kPairs) + 8 * (quad % kPairs);
          __m256 values[kRows];
          for (int row = 0; row < kRows; ++row) {
            values[row] = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(
                x + row * x_stride + kTileSide * tile + first));
          }
          for (int group = 0; group < kGroups; ++group) {
            __m256 weights = _mm256_load_ps(block + kTileWeights * tile +
                                            32 * (kGroups * half + group) + 8 * quad);
            // Else GCC loads them anew for each row, and loads limit the loop.
            __asm__("" : "+x"(weights));
            for (int row = 0; row < kRows; ++row) {
              sums[row][group] =
                  _mm256_fmadd_ps(weights, values[row], sums[row][group]);
            }
          }
        }
      }
      for (int row = 0; row < kRows; ++row) {
        float* to = y + row * y_stride + 8 * half;
        _mm256_storeu_ps(to,
                         _mm256_add_ps(_mm256_loadu_ps(to), sum_columns(sums[row])));
      }
    }
  }
};

}  // namespace

const Kernel kAvx2Float[kCodebooks] = {
    float_kernel<Float<Codebook::k3Inst, false>>("avx2"),
    float_kernel<Float<Codebook::kMcg, false>>("avx2"),
    float_kernel<Float<Codebook::kMul1, false>>("avx2"),
};
const Kernel kAvx2Exact[kCodebooks] = {
    float_kernel<Float<Codebook::k3Inst, true>>("avx2 exact"),
    float_kernel<Float<Codebook::kMcg, true>>("avx2 exact"),
    float_kernel<Float<Codebook::kMul1, true>>("avx2 exact"),
};

}  // namespace exl3::cpu

#endif
