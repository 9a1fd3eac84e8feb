// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The dense product: transformed activations times trellis shards, output transform,
// bias. See pipeline.cuh for the main loop and split.cuh for shared sums.
#pragma once

#include "exl3/kernels/elements.cuh"
#include "exl3/kernels/epilogue.cuh"
#include "exl3/kernels/integers.cuh"
#include "exl3/kernels/split.cuh"

namespace exl3 {

constexpr int kFlagBytes = 16;

// The order of tiles: eight row blocks share their activations in L2 while the column
// blocks pass by, and neighbours share a strip.
struct TilePlace {
  int row_block, column_block;
};

__device__ __forceinline__ TilePlace tile_place(int tile, int row_blocks,
                                                int column_blocks) {
  constexpr int kTogether = 8;
  const int group = tile / (kTogether * column_blocks);
  const int first = group * kTogether;
  const int rows = min(kTogether, row_blocks - first);
  const int within = tile - first * column_blocks;
  return {first + within % rows, within / rows};
}

template <int kRows, int kWords, int kCopies>
constexpr int kGemmSharedBytes =
    (Pipeline<kRows, kWords, kCopies>::kBytes > kResultBytes<kRows>
         ? Pipeline<kRows, kWords, kCopies>::kBytes
         : kResultBytes<kRows>)+kFlagBytes;

// Grid: (tiles, splits).
template <int kRows, int kWords, Decoder kDecoder>
// The compiler would keep many operands of kIntegers in registers, for little.
__global__ void __launch_bounds__(kBlockThreads, kDecoder == Decoder::kIntegers ? 3 : 2)
    gemm_kernel(const GemmParams p) {
  constexpr int kCopies = copies_of(kDecoder);
  using Loop = Pipeline<kRows, kWords, kCopies>;
  const uint32_t base = ptx::shared_base();
  const uint32_t flag = base + kGemmSharedBytes<kRows, kWords, kCopies> - kFlagBytes;
  const int tile = blockIdx.x;
  const int split = blockIdx.y;
  const int splits = gridDim.y;
  const int tiles = p.row_blocks * p.column_blocks;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const TilePlace place = tile_place(tile, p.row_blocks, p.column_blocks);

  int s = 0;
  while (s + 1 < p.num_shards && p.shards[s + 1].first_block <= place.column_block) ++s;
  const GemmShard& shard = p.shards[s];
  const int block = place.column_block - shard.first_block;  // of the shard

  const int first_row = place.row_block * kRows;
  const int stages = p.k / kStageDepth;
  Operands operands;
  operands.hash = p.hash;
  operands.k = p.k;
  operands.rows = min(kRows, p.rows - first_row);
  operands.activations =
      p.activations + (int64_t{shard.slab} * p.rows + first_row) * p.k * kCopies;
  operands.strip = p.trellis + shard.trellis +
                   (int64_t{block} * kBlockWarps + warp) * (p.k / kTileSide) * kWords;
  operands.first_stage = stages * split / splits;
  operands.end_stage = stages * (split + 1) / splits;

  Accumulators<kRows> sums;
  if constexpr (kDecoder == Decoder::kIntegers) {
    const int64_t row = int64_t{shard.slab} * p.rows + first_row;
    IntegerSums integers{};
    Loop::template run<kDecoder>(base, operands, integers);
    to_float(integers, operands, p.scales + row,
             p.stage_sums + row * (p.k / kStageDepth), sums);
  } else {
    clear(sums);
    Loop::template run<kDecoder>(base, operands, sums);
  }
  ptx::allow_next_launch();

  if (splits > 1) {
    const auto part = [&](int i) {
      return p.parts + (int64_t{i} * tiles + tile) * kPartFloats<kRows>;
    };
    store_part<kRows>(part(split), sums);
    if (!arrive_last(p.counters + tile, splits, flag)) return;
    clear(sums);
    for (int i = 0; i < splits; ++i) add_part<kRows>(part(i), sums);
  }

  __syncthreads();  // the stages are read; now they hold the result
  store_result<kRows>(base, sums);
  __syncthreads();

  const int column = block * kBlockColumns + 4 * lane;  // of the shard, as stored
  float scales[4];
  load_scales(p.svh + shard.svh + column, scales);
  const int64_t out_column = shard.out_first + column;
  const bool whole = column >= shard.keep_first && column + 4 <= shard.keep_end;
  const bool aligned = whole && p.out_columns % 4 == 0 && out_column % 4 == 0;
  float bias[4] = {};
  if (p.bias != nullptr && whole) {
    load_four(p.bias, out_column, 4, aligned, p.type, bias);
  } else if (p.bias != nullptr) {
    for (int i = 0; i < 4; ++i) {
      if (column + i >= shard.keep_first && column + i < shard.keep_end) {
        bias[i] = load_element(p.bias, out_column + i, p.type);
      }
    }
  }
  for (int row = warp; row < operands.rows; row += kBlockWarps) {
    float values[4];
    transformed_row(base, row, scales, values);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] += bias[i];
    const int64_t index = int64_t{first_row + row} * p.out_columns + out_column;
    if (whole) {
      store_four(p.out, index, aligned, p.type, values);
      continue;
    }
    for (int i = 0; i < 4; ++i) {
      if (column + i >= shard.keep_first && column + i < shard.keep_end) {
        store_element(p.out, index + i, values[i], p.type);
      }
    }
  }
}

}  // namespace exl3
