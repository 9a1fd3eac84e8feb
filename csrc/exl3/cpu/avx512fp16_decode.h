// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Values as the format computes them, in fp16. Only files of this tier include it.
#pragma once

#include "exl3/cpu/avx512_decode.h"

#define EXL3_AVX512FP16                                                             \
  __attribute__((                                                                   \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512fp16," \
             "fma,f16c")))

namespace exl3::cpu {
namespace {

// The sum of a 3inst or mcg hash's halves, after the mask and `kConstant`.
template <uint16_t kConstant>
EXL3_AVX512FP16 inline __m512h add_halves(Hash z) {
  constexpr int kAndXor = (0xF0 & 0xCC) ^ 0xAA;
  const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0x8FFF));
  const __m512i constant = _mm512_set1_epi16(static_cast<int16_t>(kConstant));
  return _mm512_add_ph(
      _mm512_castsi512_ph(_mm512_ternarylogic_epi32(z.low, mask, constant, kAndXor)),
      _mm512_castsi512_ph(_mm512_ternarylogic_epi32(z.high, mask, constant, kAndXor)));
}

// The values of 32 states, in the states' order.
template <Codebook kCodebook>
EXL3_AVX512FP16 inline __m512h decode_halves(__m512i state) {
  const Hash z = hash<kCodebook>(state);
  if constexpr (kCodebook == Codebook::kMul1) {
    // 0x6400 is 1024, whose last bit is worth 1.
    const __m512i sums = _mm512_add_epi16(byte_sums(z), _mm512_set1_epi16(0x6400));
    const __m512i scale = _mm512_set1_epi16(0x1EEE);
    const __m512i offset = _mm512_set1_epi16(static_cast<int16_t>(0xC931));
    return _mm512_fmadd_ph(_mm512_castsi512_ph(sums), _mm512_castsi512_ph(scale),
                           _mm512_castsi512_ph(offset));
  } else {
    return add_halves<0x3B60>(z);
  }
}

}  // namespace
}  // namespace exl3::cpu
