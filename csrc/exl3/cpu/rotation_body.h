// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The functions of rotation.h, once for each instruction set: a file that includes this
// defines EXL3_TARGET as the attribute of its own and EXL3_VECTOR_BYTES as its
// registers' size. The compiler makes vectors of the loops.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "exl3/cpu/rotation.h"

namespace exl3::cpu {
namespace {

typedef float Vector __attribute__((vector_size(EXL3_VECTOR_BYTES)));
typedef int32_t Indices __attribute__((vector_size(EXL3_VECTOR_BYTES)));
constexpr int kLanes = EXL3_VECTOR_BYTES / 4;
constexpr int kVectors = kHadamardBlock / kLanes;
constexpr float kInverseSqrt128 = 0.08838834764831845f;

// Adds neighbours at distance kStep within each vector, and subtracts them.
template <int kStep>
EXL3_TARGET inline void butterfly_lanes(Vector& v) {
  Indices partners;
  Vector signs;
  for (int i = 0; i < kLanes; ++i) {
    partners[i] = i ^ kStep;
    signs[i] = i & kStep ? -1.0f : 1.0f;
  }
#if defined(__clang__)
  Vector partner;
  for (int i = 0; i < kLanes; ++i) partner[i] = v[partners[i]];
#else
  const Vector partner = __builtin_shuffle(v, partners);
#endif
  v = v * signs + partner;
}

EXL3_TARGET inline void hadamard(float* block) {
  Vector v[kVectors];
  std::memcpy(v, block, sizeof(v));
  for (Vector& one : v) {
    butterfly_lanes<1>(one);
    butterfly_lanes<2>(one);
    if constexpr (kLanes > 4) butterfly_lanes<4>(one);
    if constexpr (kLanes > 8) butterfly_lanes<8>(one);
  }
#pragma GCC unroll 5
  for (int step = 1; step < kVectors; step *= 2) {
#pragma GCC unroll 32
    for (int i = 0; i < kVectors; ++i) {
      if (i & step) continue;
      const Vector a = v[i];
      const Vector b = v[i + step];
      v[i] = a + b;
      v[i + step] = a - b;
    }
  }
  std::memcpy(block, v, sizeof(v));
}

EXL3_TARGET inline void load_halves(const uint16_t* from, int64_t count, float* to) {
#if defined(__x86_64__) && EXL3_VECTOR_BYTES >= 32  // which implies F16C
  const int64_t whole = count / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    const auto* halves = reinterpret_cast<const __m128i*>(from + i);
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(halves)));
  }
#else
  const int64_t whole = 0;
#endif
  for (int64_t i = whole; i < count; ++i) to[i] = half_to_float(from[i]);
}

EXL3_TARGET inline void store_halves(const float* from, int64_t count, uint16_t* to) {
#if defined(__x86_64__) && EXL3_VECTOR_BYTES >= 32
  const int64_t whole = count / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#else
  const int64_t whole = 0;
#endif
  for (int64_t i = whole; i < count; ++i) to[i] = float_to_half(from[i]);
}

EXL3_TARGET inline void load(const void* x, int64_t first, int64_t count, DType dtype,
                             float* out) {
  const auto* words = static_cast<const uint16_t*>(x) + first;
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(out, static_cast<const float*>(x) + first, count * sizeof(float));
      break;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) out[i] = bfloat_to_float(words[i]);
      break;
    case DType::kFloat16:
      load_halves(words, count, out);
      break;
  }
}

// Scales the block by 1/sqrt(128) and, if there are any, by `scales`.
EXL3_TARGET inline void scale(float* block, const uint16_t* scales) {
  if (scales != nullptr) {
    float factors[kHadamardBlock];
    load_halves(scales, kHadamardBlock, factors);
    for (int i = 0; i < kHadamardBlock; ++i) block[i] *= factors[i];
  }
  for (int i = 0; i < kHadamardBlock; ++i) block[i] *= kInverseSqrt128;
}

EXL3_TARGET void rotate_input(const void* x, DType dtype, int64_t present,
                              const uint16_t* suh, int64_t k, float* out) {
  for (int64_t first = 0; first < k; first += kHadamardBlock) {
    float* block = out + first;
    const int64_t count = std::clamp<int64_t>(present - first, 0, kHadamardBlock);
    if (count == kHadamardBlock) {
      load(x, first, kHadamardBlock, dtype, block);
    } else {
      load(x, first, count, dtype, block);
      std::fill(block + count, block + kHadamardBlock, 0.0f);
    }
    scale(block, suh == nullptr ? nullptr : suh + first);
    hadamard(block);
  }
}

EXL3_TARGET void rotate_output(float* y, const uint16_t* svh, int64_t n) {
  for (int64_t first = 0; first < n; first += kHadamardBlock) {
    hadamard(y + first);
    scale(y + first, svh == nullptr ? nullptr : svh + first);
  }
}

EXL3_TARGET void add(const void* x, int64_t first, int64_t count, DType dtype,
                     float* y) {
  float chunk[kHadamardBlock];
  for (int64_t done = 0; done < count; done += kHadamardBlock) {
    const int64_t now = std::min<int64_t>(kHadamardBlock, count - done);
    load(x, first + done, now, dtype, chunk);
    for (int64_t i = 0; i < now; ++i) y[done + i] += chunk[i];
  }
}

EXL3_TARGET void store(const float* values, int64_t count, void* out, int64_t first,
                       DType dtype) {
  auto* words = static_cast<uint16_t*>(out) + first;
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(static_cast<float*>(out) + first, values, count * sizeof(float));
      break;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) words[i] = float_to_bfloat(values[i]);
      break;
    case DType::kFloat16:
      store_halves(values, count, words);
      break;
  }
}

}  // namespace
}  // namespace exl3::cpu
