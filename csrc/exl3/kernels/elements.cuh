// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Tensors of float32, bfloat16 or float16 values, four neighbours at a time.
#pragma once

#include <cstdint>

#include "exl3/kernels/params.h"
#include "exl3/ptx/ptx.cuh"

namespace exl3 {

constexpr float kLargestHalf = 65504.0f;

// fp16's range ends where bf16's does not: beyond it a value is clamped, never
// infinite. NaN stays NaN. Returns how many were clamped.
__device__ __forceinline__ int clamp_to_half(float (&values)[4]) {
  int clamped = 0;
#pragma unroll
  for (float& value : values) {
    if (value > kLargestHalf) {
      value = kLargestHalf;
      ++clamped;
    } else if (value < -kLargestHalf) {
      value = -kLargestHalf;
      ++clamped;
    }
  }
  return clamped;
}

// Adds to what a workspace counts. An atomic, but no data: no result depends on it.
__device__ __forceinline__ void count_clamped(unsigned long long* counter,
                                              int clamped) {
  if (clamped > 0 && counter != nullptr) {
    atomicAdd(counter, static_cast<unsigned long long>(clamped));
  }
}

// Of values in fp16's range.
__device__ __forceinline__ uint2 pack_half4(const float (&values)[4]) {
  return {ptx::pack_half2(values[0], values[1]), ptx::pack_half2(values[2], values[3])};
}

__device__ __forceinline__ void unpack_half4(uint2 packed, float (&values)[4]) {
  values[0] = ptx::half_to_float(static_cast<uint16_t>(packed.x));
  values[1] = ptx::half_to_float(static_cast<uint16_t>(packed.x >> 16));
  values[2] = ptx::half_to_float(static_cast<uint16_t>(packed.y));
  values[3] = ptx::half_to_float(static_cast<uint16_t>(packed.y >> 16));
}

// Four scales: fp16 [.., multiple of 4], constant during the launch.
__device__ __forceinline__ void load_scales(const uint16_t* scales,
                                            float (&values)[4]) {
  unpack_half4(ptx::load_constant(reinterpret_cast<const uint2*>(scales)), values);
}

// 16 bits to float and back, for the two 16-bit types.
__device__ __forceinline__ float widen(uint16_t bits, ElementType type) {
  return type == ElementType::kBFloat16 ? ptx::bfloat16_to_float(bits)
                                        : ptx::half_to_float(bits);
}

__device__ __forceinline__ uint16_t narrow(float value, ElementType type) {
  return type == ElementType::kBFloat16 ? ptx::float_to_bfloat16(value)
                                        : ptx::float_to_half(value);
}

__device__ __forceinline__ float load_element(const void* tensor, int64_t index,
                                              ElementType type) {
  if (type == ElementType::kFloat32) {
    return ptx::load_global(static_cast<const float*>(tensor) + index);
  }
  return widen(ptx::load_global(static_cast<const uint16_t*>(tensor) + index), type);
}

__device__ __forceinline__ void store_element(void* tensor, int64_t index, float value,
                                              ElementType type) {
  if (type == ElementType::kFloat32) {
    ptx::store_global(static_cast<float*>(tensor) + index, value);
  } else {
    ptx::store_global(static_cast<uint16_t*>(tensor) + index, narrow(value, type));
  }
}

// The elements index to index+3 of which the first `count` exist; the rest reads as 0.
// `aligned`: four elements from here on are aligned as one vector.
__device__ __forceinline__ void load_four(const void* tensor, int64_t index, int count,
                                          bool aligned, ElementType type,
                                          float (&values)[4]) {
  if (aligned && count >= 4) {
    if (type == ElementType::kFloat32) {
      const auto* from = static_cast<const float*>(tensor) + index;
      const float4 four = ptx::load_global(reinterpret_cast<const float4*>(from));
      values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else {
      const auto* from = static_cast<const uint16_t*>(tensor) + index;
      const uint2 four = ptx::load_global(reinterpret_cast<const uint2*>(from));
      values[0] = widen(static_cast<uint16_t>(four.x), type);
      values[1] = widen(static_cast<uint16_t>(four.x >> 16), type);
      values[2] = widen(static_cast<uint16_t>(four.y), type);
      values[3] = widen(static_cast<uint16_t>(four.y >> 16), type);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = i < count ? load_element(tensor, index + i, type) : 0.0f;
  }
}

__device__ __forceinline__ void store_four(void* tensor, int64_t index, bool aligned,
                                           ElementType type, const float (&values)[4]) {
  if (aligned && type == ElementType::kFloat32) {
    auto* to = static_cast<float*>(tensor) + index;
    ptx::store_global(reinterpret_cast<float4*>(to),
                      make_float4(values[0], values[1], values[2], values[3]));
  } else if (aligned) {
    auto* to = static_cast<uint16_t*>(tensor) + index;
    const uint2 four = {
        narrow(values[0], type) | static_cast<uint32_t>(narrow(values[1], type)) << 16,
        narrow(values[2], type) | static_cast<uint32_t>(narrow(values[3], type)) << 16};
    ptx::store_global(reinterpret_cast<uint2*>(to), four);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_element(tensor, index + i, values[i], type);
  }
}

}  // namespace exl3
