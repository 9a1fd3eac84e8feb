// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// IEEE half precision and bfloat16 as bit patterns, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace emu {

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float half_to_float_slowly(uint16_t half) {
  const uint32_t sign = uint32_t{half} >> 15 << 31;
  const uint32_t exponent = half >> 10 & 0x1f;
  const uint32_t mantissa = half & 0x3ff;
  if (exponent == 0x1f) return bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

// A table: the tensor core's operands are converted by the million.
inline float half_to_float(uint16_t half) {
  struct Table {
    float value[65536];
    Table() {
      for (uint32_t bits = 0; bits < 65536; ++bits) {
        value[bits] = half_to_float_slowly(static_cast<uint16_t>(bits));
      }
    }
  };
  static const Table table;
  return table.value[half];
}

// From double, so that a float is rounded once, and so is the exact product or sum of
// two halves.
inline uint16_t half_from_double(double value) {
  const auto bits = bit_cast<uint64_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 48 & 0x8000);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023;
  uint64_t mantissa = bits & 0xfffffffffffffull;
  if (exponent == 1024) return sign | (mantissa ? 0x7fff : 0x7c00);
  if (exponent > 15) return sign | 0x7c00;
  if (exponent < -25) return sign;
  mantissa |= 1ull << 52;
  // Normal halves keep 10 of the 52 fraction bits; subnormal ones fewer.
  const int drop = exponent >= -14 ? 42 : 42 + (-14 - exponent);
  uint64_t kept = mantissa >> drop;
  const uint64_t rest = mantissa & ((1ull << drop) - 1);
  const uint64_t tie = 1ull << (drop - 1);
  if (rest > tie || (rest == tie && (kept & 1))) ++kept;
  // kept still holds the leading one, which adds 1 to the exponent field.
  const int field = exponent >= -14 ? exponent + 14 : 0;
  return static_cast<uint16_t>(sign | ((static_cast<uint64_t>(field) << 10) + kept));
}

// round(a * b + c), once. The product of two halves is exact in double; the sum may
// not be, so it is rounded to odd before it is rounded to half.
inline uint16_t half_fma(uint16_t a, uint16_t b, uint16_t c) {
  const double product = double{half_to_float(a)} * half_to_float(b);
  const double addend = half_to_float(c);
  const double sum = product + addend;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  auto bits = bit_cast<uint64_t>(sum);
  if (error != 0 && !(bits & 1)) bits += (error > 0) == (sum > 0) ? 1 : -1;
  return half_from_double(bit_cast<double>(bits));
}

inline float bfloat16_to_float(uint16_t value) {
  return bit_cast<float>(uint32_t{value} << 16);
}

inline uint16_t bfloat16_from_float(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN, as the device has it
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

}  // namespace emu
