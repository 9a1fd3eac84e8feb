// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The three codebooks: what a 16-bit trellis state stands for. Host and device, plain
// C++17; kernels have faster forms of the same values and are tested against these.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define EXL3_HD __host__ __device__
#else
#define EXL3_HD
#endif

namespace exl3 {

// The numbers are part of the ops' contract.
enum class Codebook : int { k3Inst = 0, kMcg = 1, kMul1 = 2 };

constexpr int kCodebooks = 3;
constexpr int kStates = 1 << 16;

constexpr uint32_t kMcgMultiplier = 0xCBAC1FED;
constexpr uint32_t kMul1Multiplier = 0x83DCD12D;

// The state after the codebook's multiplicative hash.
EXL3_HD constexpr uint32_t hash_state(Codebook codebook, uint32_t state) {
  switch (codebook) {
    case Codebook::kMcg:
      return state * kMcgMultiplier;
    case Codebook::kMul1:
      return state * kMul1Multiplier;
    default:
      return state * 89226354u + 64248484u;
  }
}

// An fp16 value as an integer multiple of 2^-kFraction. Every codebook value is one
// (3inst and mcg of 2^-13, mul1 of 2^-18), so they are computed and rounded in
// integers, exactly, on any machine.
struct FixedPoint {
  int32_t units;
  int fraction;
};

// Rounds to fp16's 11 significant bits, ties to even.
EXL3_HD constexpr int32_t round_to_half_precision(int32_t units) {
  const int32_t size = units < 0 ? -units : units;
  int dropped = 0;
  while ((size >> dropped) >= 2048) ++dropped;
  if (dropped == 0) return units;
  const int32_t half = 1 << (dropped - 1);
  int32_t kept = size >> dropped;
  const int32_t rest = size - (kept << dropped);
  if (rest > half || (rest == half && (kept & 1))) ++kept;
  return (units < 0 ? -kept : kept) * (1 << dropped);
}

// One half of a masked hash, `sign 1 | exponent 5 | mantissa 10`, in units of 2^-13.
// The mask leaves exponents 12 to 15 only.
EXL3_HD constexpr int32_t half_units(uint32_t bits) {
  const int32_t mantissa = static_cast<int32_t>(1024 + (bits & 0x3FF));
  const int32_t units = mantissa << (((bits >> 10) & 31) - 12);
  return (bits & 0x8000) ? -units : units;
}

EXL3_HD constexpr FixedPoint codebook_fixed(Codebook codebook, uint32_t state) {
  const uint32_t hash = hash_state(codebook, state & 0xFFFF);
  if (codebook == Codebook::kMul1) {
    // fma(1024 + sum of bytes, 0x1EEE, 0xC931) of fp16, which rounds once:
    // 0x1EEE = 1774 * 2^-18, 0xC931 = -1329 * 2^-7.
    const int32_t bytes = static_cast<int32_t>((hash & 0xFF) + ((hash >> 8) & 0xFF) +
                                               ((hash >> 16) & 0xFF) + (hash >> 24));
    return {round_to_half_precision(1774 * (1024 + bytes) - 1329 * 2048), 18};
  }
  const uint32_t halves = (hash & 0x8FFF8FFF) ^ 0x3B603B60;
  return {
      round_to_half_precision(half_units(halves & 0xFFFF) + half_units(halves >> 16)),
      13};
}

// The value of a state; exact in float.
EXL3_HD constexpr float codebook_value(Codebook codebook, uint32_t state) {
  const FixedPoint value = codebook_fixed(codebook, state);
  return static_cast<float>(value.units) / static_cast<float>(1 << value.fraction);
}

static_assert(codebook_value(Codebook::k3Inst, 0x8000) == -0.498046875f, "0xB7F8");
static_assert(codebook_value(Codebook::kMcg, 0) == 1.84375f, "0x3F60");
static_assert(codebook_value(Codebook::kMul1, 0xFFFF) == -0.6513671875f, "0xB936");

}  // namespace exl3
