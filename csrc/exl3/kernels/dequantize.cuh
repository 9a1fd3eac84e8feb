// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// A trellis matrix as float32: the inner matrix as stored, or with both transforms the
// matrix that inputs are multiplied with. For tests and conversions, not for speed.
#pragma once

#include "exl3/kernels/elements.cuh"
#include "exl3/kernels/epilogue.cuh"

namespace exl3 {

template <int kWords>
constexpr int kDequantizeSharedBytes =
    kResultBytes<kHadamardBlock> + kBlockWarps * kWords * 2;

// Grid: (n/128, k/128). A block decodes [128, 128] into shared memory, a strip a warp;
// behind that lie the words of each warp's tile.
template <int kWords, Codebook kCodebook>
__global__ void __launch_bounds__(kBlockThreads) dequantize_kernel(DequantizeParams p) {
  const uint32_t base = ptx::shared_base();
  const uint32_t words = base + kResultBytes<kHadamardBlock>;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const auto place = LaneBits<kWords>::place(lane);
  const uint32_t tile = words + warp * kWords * 2;
  const int64_t strip = int64_t{blockIdx.x} * kBlockWarps + warp;
  constexpr int kTiles = kHadamardBlock / kTileSide;
  const uint16_t* source =
      p.trellis + (strip * (p.k / kTileSide) + int64_t{blockIdx.y} * kTiles) * kWords;

  ptx::wait_for_previous_launch();
  for (int i = 0; i < kTiles; ++i) {
    __syncwarp();  // the tile before is decoded
    for (int word = 2 * lane; word < kWords; word += 64) {
      const auto* from = reinterpret_cast<const uint32_t*>(source + i * kWords + word);
      ptx::store_shared(tile + word * 2, ptx::load_constant(from));
    }
    __syncwarp();
    const TileOperands<false> operands = decode_tile<kWords, kCodebook>(tile, place);
#pragma unroll
    for (int j = 0; j < kLaneWeights; ++j) {
      const int row = i * kTileSide + 2 * (lane % 4) + j % 2 + j / 2 % 2 * 8;
      const int column = warp * kTileSide + lane / 4 + j / 4 * 8;
      const uint32_t pair = operands.registers[j / 2];
      ptx::store_shared(
          base + row * kResultPitch + column * 4,
          ptx::half_to_float(static_cast<uint16_t>(j % 2 == 0 ? pair : pair >> 16)));
    }
  }
  __syncthreads();

  const int64_t first_row = int64_t{blockIdx.y} * kHadamardBlock;
  const int64_t first_column = int64_t{blockIdx.x} * kBlockColumns;
  if (p.suh != nullptr) {
    for (int i = warp; i < kBlockColumns; i += kBlockWarps) {  // columns, along k
      const uint32_t column = base + 4 * lane * kResultPitch + i * 4;
      float values[4];
      float scales[4];
      load_scales(p.suh + first_row + 4 * lane, scales);
      for (int j = 0; j < 4; ++j) {
        values[j] = ptx::load_shared<float>(column + j * kResultPitch);
      }
      hadamard_128(values, lane);
      for (int j = 0; j < 4; ++j) {
        ptx::store_shared(column + j * kResultPitch,
                          values[j] * kHadamardScale * scales[j]);
      }
    }
    __syncthreads();
  }
  for (int row = warp; row < kHadamardBlock; row += kBlockWarps) {
    float values[4];
    if (p.svh != nullptr) {
      float scales[4];
      load_scales(p.svh + first_column + 4 * lane, scales);
      transformed_row(base, row, scales, values);
    } else {
      const auto four =
          ptx::load_shared<float4>(base + row * kResultPitch + lane * kChunkBytes);
      values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    }
    store_four(p.out, (first_row + row) * p.n + first_column + 4 * lane, true,
               ElementType::kFloat32, values);
  }
}

}  // namespace exl3
