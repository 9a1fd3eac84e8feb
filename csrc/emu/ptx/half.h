// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Twin of exl3/ptx/half.cuh.
#pragma once

#include "emu/half.h"

namespace ptx {

inline uint16_t low_half(uint32_t pair) { return static_cast<uint16_t>(pair); }
inline uint16_t high_half(uint32_t pair) { return static_cast<uint16_t>(pair >> 16); }

inline uint16_t add_half(uint16_t a, uint16_t b) {
  // The sum of two halves is exact in double.
  return emu::half_from_double(double{emu::half_to_float(a)} + emu::half_to_float(b));
}

inline uint32_t add_half2(uint32_t a, uint32_t b) {
  return add_half(low_half(a), low_half(b)) |
         uint32_t{add_half(high_half(a), high_half(b))} << 16;
}

inline uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
  return emu::half_fma(low_half(a), low_half(b), low_half(c)) |
         uint32_t{emu::half_fma(high_half(a), high_half(b), high_half(c))} << 16;
}

inline uint16_t float_to_half(float value) { return emu::half_from_double(value); }
inline float half_to_float(uint16_t bits) { return emu::half_to_float(bits); }

inline uint32_t pack_half2(float low, float high) {
  return float_to_half(low) | uint32_t{float_to_half(high)} << 16;
}

inline uint16_t float_to_bfloat16(float value) {
  return emu::bfloat16_from_float(value);
}
inline float bfloat16_to_float(uint16_t bits) { return emu::bfloat16_to_float(bits); }

inline uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t flips) {
  return (x & mask) ^ flips;
}

}  // namespace ptx
