// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The AVX-512 kernels with float activations.

#include "exl3/cpu/avx512.h"

#if defined(__x86_64__)

#include "exl3/cpu/avx512_decode.h"
#include "exl3/cpu/float_rows.h"

namespace exl3::cpu {
namespace {

template <Codebook kCodebook, bool kExact>
struct Float {
  using Weight = float;
  using Activation = float;
  static constexpr int64_t kTiles = 16;  // 16 KiB
  static constexpr int kRows = 3;        // as many as 32 registers hold sums for

  EXL3_AVX512 static void decode(const uint16_t* tiles, int words, int64_t count,
                                 float* block) {
    for_states(tiles, words, count, [block](int64_t vector, __m512i state) EXL3_AVX512 {
      __m512 values[2];
      decode_values<kCodebook, kExact>(state, values);
      _mm512_store_ps(block + 32 * vector, values[0]);
      _mm512_store_ps(block + 32 * vector + 16, values[1]);
    });
  }

  template <int kRows>
  EXL3_AVX512 static void multiply(const float* block, int64_t tiles, const float* x,
                                   int64_t x_stride, float* y, int64_t y_stride) {
    __m512 sums[kRows][kVectors];
    for (auto& row : sums) {
      for (__m512& sum : row) sum = _mm512_setzero_ps();
    }
    for (int64_t i = 0; i < 2 * tiles; ++i) {
      const float* w = block + i / 2 * kTileWeights + i % 2 * 16;
      __m512 values[kRows];
      for (int row = 0; row < kRows; ++row) {
        values[row] =
            _mm512_broadcast_f32x8(_mm256_loadu_ps(x + row * x_stride + 8 * i));
      }
      for (int vector = 0; vector < kVectors; ++vector) {
        __m512 weights = _mm512_load_ps(w + 32 * vector);
        // Else GCC loads them anew for each row, and loads are what limits the loop.
        __asm__("" : "+v"(weights));
        for (int row = 0; row < kRows; ++row) {
          sums[row][vector] = _mm512_fmadd_ps(weights, values[row], sums[row][vector]);
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      float* to = y + row * y_stride;
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum_columns(sums[row])));
    }
  }
};

}  // namespace

const Kernel kAvx512Float[kCodebooks] = {
    float_kernel<Float<Codebook::k3Inst, false>>("avx512"),
    float_kernel<Float<Codebook::kMcg, false>>("avx512"),
    float_kernel<Float<Codebook::kMul1, false>>("avx512"),
};
const Kernel kAvx512Exact[kCodebooks] = {
    float_kernel<Float<Codebook::k3Inst, true>>("avx512 exact"),
    float_kernel<Float<Codebook::kMcg, true>>("avx512 exact"),
    float_kernel<Float<Codebook::kMul1, true>>("avx512 exact"),
};

}  // namespace exl3::cpu

#endif
