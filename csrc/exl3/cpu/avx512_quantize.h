// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Rounds activations to integers. Only files of this tier include it.
#pragma once

#include "exl3/cpu/avx512_decode.h"
#include "exl3/cpu/integer_rows.h"

namespace exl3::cpu {
namespace {

// out [k] = x [k] as integers of at most `largest`, in the order of vectors of states.
// Returns what turns sums with a weight's integers into results, where a weight is
// scale * integer + offset; NaN, if any activation is infinite or NaN.
EXL3_AVX512 inline Affine quantize_row(const float* x, int64_t k, int largest,
                                       float scale, float offset, int16_t* out) {
  __m512 sizes = _mm512_setzero_ps();
  __m512 finite = _mm512_setzero_ps();  // NaN if any value is infinite or NaN
  for (int64_t i = 0; i < k; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    sizes = _mm512_max_ps(sizes, _mm512_abs_ps(v));
    finite = _mm512_fmadd_ps(v, _mm512_setzero_ps(), finite);
  }
  const float size = _mm512_reduce_max_ps(sizes);
  const float step = size / static_cast<float>(largest);
  const __m512 inverse =
      _mm512_set1_ps(size > 0 ? static_cast<float>(largest) / size : 0.0f);
  const __m256i order =
      _mm256_setr_epi16(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += 16) {
    const __m512i v =
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
    sum = _mm512_add_epi32(sum, v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_permutexvar_epi16(order, _mm512_cvtsepi32_epi16(v)));
  }
  const float total = static_cast<float>(_mm512_reduce_add_epi32(sum));
  return {step * scale + _mm512_reduce_add_ps(finite), step * offset * total};
}

}  // namespace
}  // namespace exl3::cpu
