// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
#include "exl3/cpu/hadamard.h"

#include <algorithm>

namespace exl3::cpu {
namespace {

constexpr float kInverseSqrt128 = 0.08838834764831845f;

void hadamard(float* block) {
  for (int step = 1; step < kHadamardBlock; step *= 2) {
    for (int start = 0; start < kHadamardBlock; start += 2 * step) {
      for (int i = start; i < start + step; ++i) {
        const float a = block[i];
        const float b = block[i + step];
        block[i] = a + b;
        block[i + step] = a - b;
      }
    }
  }
}

void load(const void* x, int64_t first, int64_t count, DType dtype, float* out) {
  const auto* words = static_cast<const uint16_t*>(x) + first;
  switch (dtype) {
    case DType::kFloat32:
      std::copy_n(static_cast<const float*>(x) + first, count, out);
      break;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) out[i] = bfloat_to_float(words[i]);
      break;
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) out[i] = half_to_float(words[i]);
      break;
  }
}

// Scales the block by 1/sqrt(128) and, if there are any, by `scales`.
void scale(float* block, const uint16_t* scales) {
  if (scales == nullptr) {
    for (int i = 0; i < kHadamardBlock; ++i) block[i] *= kInverseSqrt128;
  } else {
    for (int i = 0; i < kHadamardBlock; ++i) {
      block[i] *= kInverseSqrt128 * half_to_float(scales[i]);
    }
  }
}

}  // namespace

void rotate_input(const void* x, DType dtype, int64_t present, const uint16_t* suh,
                  int64_t k, float* out) {
  for (int64_t first = 0; first < k; first += kHadamardBlock) {
    float* block = out + first;
    const int64_t count = std::clamp<int64_t>(present - first, 0, kHadamardBlock);
    load(x, first, count, dtype, block);
    std::fill(block + count, block + kHadamardBlock, 0.0f);
    if (count == 0) continue;
    scale(block, suh == nullptr ? nullptr : suh + first);
    hadamard(block);
  }
}

void rotate_output(float* y, const uint16_t* svh, int64_t n) {
  for (int64_t first = 0; first < n; first += kHadamardBlock) {
    hadamard(y + first);
    scale(y + first, svh == nullptr ? nullptr : svh + first);
  }
}

void multiply(float* values, const uint16_t* scales, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] *= half_to_float(scales[i]);
}

void add(const void* x, int64_t first, int64_t count, DType dtype, float* y) {
  float chunk[kHadamardBlock];
  for (int64_t done = 0; done < count; done += kHadamardBlock) {
    const int64_t now = std::min<int64_t>(kHadamardBlock, count - done);
    load(x, first + done, now, dtype, chunk);
    for (int64_t i = 0; i < now; ++i) y[done + i] += chunk[i];
  }
}

void store(const float* values, int64_t count, void* out, int64_t first, DType dtype) {
  auto* words = static_cast<uint16_t*>(out) + first;
  switch (dtype) {
    case DType::kFloat32:
      std::copy_n(values, count, static_cast<float*>(out) + first);
      break;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) words[i] = float_to_bfloat(values[i]);
      break;
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) words[i] = float_to_half(values[i]);
      break;
  }
}

}  // namespace exl3::cpu
