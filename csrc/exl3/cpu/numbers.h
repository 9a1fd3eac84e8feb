// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Numbers as tensors store them: activations in three types, scales in fp16. The
// conversions are free of branches, so that loops over them vectorize.
#pragma once

#include <cstdint>
#include <cstring>

namespace exl3::cpu {

enum class DType { kFloat32, kBFloat16, kFloat16 };

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float half_to_float(uint16_t half) {
  const uint32_t size = half & 0x7FFFu;
  // fp16's exponent bias is 15 and float's is 127; the product is exact and gives
  // denormals their value as well.
  const float finite = bits_float(size << 13) * bits_float((127u + 112u) << 23);
  const uint32_t bits =
      size >= 0x7C00u ? (size << 13) | 0x7F800000u : float_bits(finite);
  return bits_float(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
}

// Rounds to nearest, ties to even, as torch does.
inline uint16_t float_to_half(float value) {
  const uint32_t sign = float_bits(value) >> 16 & 0x8000u;
  const uint32_t size = float_bits(value) & 0x7FFFFFFFu;
  const uint32_t normal = (size + 0xFFFu + (size >> 13 & 1u) - (112u << 23)) >> 13;
  // Adding 0.5 leaves 24 bits of which the last is worth 2^-24, fp16's least step.
  const uint32_t tiny = float_bits(bits_float(size) + 0.5f) - float_bits(0.5f);
  uint32_t half = size < (113u << 23) ? tiny : normal;
  half = size >= 0x477FF000u ? 0x7C00u : half;  // 65520 and more round to infinity
  half = size > 0x7F800000u ? 0x7E00u : half;   // NaN
  return static_cast<uint16_t>(half | sign);
}

inline float bfloat_to_float(uint16_t value) {
  return bits_float(static_cast<uint32_t>(value) << 16);
}

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(nan ? 0x7FC0u : rounded);
}

}  // namespace exl3::cpu
