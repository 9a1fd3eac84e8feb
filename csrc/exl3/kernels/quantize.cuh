// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The input transform to integers, for mul1 weights whose bytes the tensor core adds up
// (Decoder::kIntegers). A row has one scale, and 16 bits for each value: two signed
// bytes, 256 high + low.
#pragma once

#include "exl3/kernels/transform.cuh"

namespace exl3 {

constexpr int kLargestInteger = 127 * 256;
constexpr int kQuantizeSharedBytes = kBlockWarps * 4;

// The larger of two sizes; NaN if one is.
__device__ __forceinline__ float larger(float a, float b) {
  return b > a || b != b ? b : a;
}

// The largest size of a value in the row that this block has.
__device__ __forceinline__ float largest_in_block(float largest) {
  const uint32_t base = ptx::shared_base();
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    largest = larger(largest, __shfl_xor_sync(kFullWarp, largest, distance));
  }
  if (threadIdx.x % 32 == 0) ptx::store_shared(base + threadIdx.x / 32 * 4, largest);
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kBlockWarps; ++warp) {
    largest = larger(largest, ptx::load_shared<float>(base + warp * 4));
  }
  return largest;
}

// A lane's four neighbours, each byte four times, where pipeline.cuh wants them: of a
// stage first all high bytes, then all low ones. `column`: of the first.
__device__ __forceinline__ void store_bytes(uint16_t* row, int column,
                                            const int (&values)[4]) {
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int rounded = (values[i] + 128) >> 8;
    high[i] = __byte_perm(static_cast<uint32_t>(rounded), 0, 0x0000);
    low[i] = __byte_perm(static_cast<uint32_t>(values[i]), 0, 0x0000);
  }
  constexpr int kPart = kStageDepth * 2;  // in units of 16 bits, as all below
  const int stage = column / kStageDepth * 2 * kPart;
  // Eight neighbours: the even ones, then the odd ones.
  uint16_t* const to = row + stage + column % kStageDepth / 8 * 16 + column % 8 / 2 * 2;
  ptx::store_global(reinterpret_cast<uint2*>(to), uint2{high[0], high[2]});
  ptx::store_global(reinterpret_cast<uint2*>(to + 8), uint2{high[1], high[3]});
  ptx::store_global(reinterpret_cast<uint2*>(to + kPart), uint2{low[0], low[2]});
  ptx::store_global(reinterpret_cast<uint2*>(to + kPart + 8), uint2{low[1], low[3]});
}

// Grid: a block for each row of each slab. It transforms the row twice: its largest
// value is known after the first time.
__global__ void __launch_bounds__(kBlockThreads) quantize_kernel(QuantizeParams q) {
  const TransformParams& p = q.transform;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const unsigned row = blockIdx.x;  // over all slabs
  const auto transformed = [&](int column, float (&values)[4]) {
    float pre[4];
    constexpr float kPost[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    load_scales(p.pre + int64_t{row / p.rows} * p.k + column, pre);
    transform_four(p, row % p.rows, column, pre, kPost, values);
  };
  ptx::allow_next_launch();
  ptx::wait_for_previous_launch();

  float largest = 0.0f;
  for (int first = warp * kHadamardBlock; first < p.k;
       first += kBlockWarps * kHadamardBlock) {
    float values[4];
    transformed(first + 4 * lane, values);
#pragma unroll
    for (const float value : values) {
      largest = larger(largest, value < 0.0f ? -value : value);
    }
  }
  largest = largest_in_block(largest);
  // What is smaller than this counts as zero. An infinite or NaN row gives NaN: all of
  // its integers are zeros, and its scale is not finite.
  constexpr float kSmallest = 1e-30f;
  const bool has_values = largest > kSmallest && largest <= 3e38f;
  const float inverse = has_values ? kLargestInteger / largest : 0.0f;
  if (threadIdx.x == 0) {
    const float scale = largest <= kSmallest ? 0.0f : largest / kLargestInteger;
    ptx::store_global(q.scales + row, scale);
  }

  auto* const out = static_cast<uint16_t*>(p.out) + int64_t{row} * p.k * 4;
  for (int first = warp * kHadamardBlock; first < p.k;
       first += kBlockWarps * kHadamardBlock) {
    const int column = first + 4 * lane;
    float values[4];
    transformed(column, values);
    int integers[4];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      integers[i] = has_values ? __float2int_rn(values[i] * inverse) : 0;
      sum += integers[i];
    }
    store_bytes(out, column, integers);
    constexpr int kStageLanes = kStageDepth / 4;
#pragma unroll
    for (int distance = 1; distance < kStageLanes; distance *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, distance);
    }
    if (lane % kStageLanes == 0) {
      ptx::store_global(
          q.stage_sums + int64_t{row} * (p.k / kStageDepth) + column / kStageDepth,
          sum);
    }
  }
}

}  // namespace exl3
