// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The routed experts' two products. A block has one tile's rows and 128 columns of one
// virtual expert; experts may differ in the kind of their tiles.
//
// The first product's epilogue applies the activation and the second product's input
// transform: Hadamard blocks are 128 wide on both sides, so what a block needs for it
// is what it has.
#pragma once

#include "exl3/kernels/any_tile.cuh"
#include "exl3/kernels/elements.cuh"
#include "exl3/kernels/epilogue.cuh"
#include "exl3/kernels/moe_params.h"
#include "exl3/kernels/split.cuh"

namespace exl3 {

template <int kRows>
constexpr int kMoeLoopBytes =
    any_tile_bytes<kRows>() > kResultBytes<kRows> ? any_tile_bytes<kRows>()
                                                  : kResultBytes<kRows>;
constexpr int kMoeFlagBytes = 16;

// The stages; behind them the gate's result, which waits for up's; the flag.
template <int kRows>
constexpr int kGateUpBytes = kMoeLoopBytes<kRows> + kResultBytes<kRows> + kMoeFlagBytes;
template <int kRows>
constexpr int kDownBytes = kMoeLoopBytes<kRows> + kMoeFlagBytes;

// Blocks that share a multiprocessor. For few rows three, which limits registers to 80:
// such a block waits for memory, and others must not.
template <int kRows>
constexpr int kBlocksTogether = kRows == 16 ? 3 : 2;

// What one block works on.
struct MoeBlock {
  MoeTile tile;
  int slice;
  int column_block;
  int64_t expert;  // virtual
};

// False if there are fewer tiles than the grid allows for.
__device__ __forceinline__ bool find_block(const MoeParams& p, int column_blocks,
                                           MoeBlock& block) {
  const int tile = blockIdx.x / column_blocks % p.max_tiles;
  if (tile >= ptx::load_global(&p.totals->tiles)) return false;
  block.tile = ptx::load_global(p.tiles + tile);
  block.slice = blockIdx.x / column_blocks / p.max_tiles;
  block.column_block = blockIdx.x % column_blocks;
  block.expert = int64_t{block.tile.expert} * p.slices + block.slice;
  return true;
}

// Adds up this block's split of k. matrix: 0 gate, 1 up, 2 down.
template <int kRows>
__device__ __forceinline__ void multiply_expert(const MoeParams& p, uint32_t base,
                                                const MoeBlock& block, int matrix,
                                                const uint16_t* slab,
                                                const uint16_t* activations, int64_t k,
                                                Accumulators<kRows>& sums) {
  const int64_t* description = p.experts + (block.expert * 3 + matrix) * 3;
  const int64_t offset = ptx::load_constant(description);
  const int words = static_cast<int>(ptx::load_constant(description + 1));
  const auto codebook = static_cast<Codebook>(ptx::load_constant(description + 2));
  const int stages = static_cast<int>(k / kStageDepth);
  const int splits = gridDim.y;
  Operands operands;
  operands.hash = hash_of(codebook);
  operands.k = k;
  operands.rows = block.tile.rows;
  operands.activations = activations;
  operands.strip = slab + offset +
                   (int64_t{block.column_block} * kBlockWarps + threadIdx.x / 32) *
                       (k / kTileSide) * words;
  operands.first_stage = stages * static_cast<int>(blockIdx.y) / splits;
  operands.end_stage = stages * (static_cast<int>(blockIdx.y) + 1) / splits;
  clear(sums);
  multiply_any<kRows>(base, operands, words, decoder_of(codebook), sums);
}

// silu(gate) * up, both clamped: gate from above, up on both sides. NaN stays NaN.
__device__ __forceinline__ float activate(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Grid: (slices * max_tiles * intermediate/128, splits).
template <int kRows>
__global__ void __launch_bounds__(kBlockThreads, kBlocksTogether<kRows>)
    moe_gate_up_kernel(const MoeParams p) {
  const uint32_t base = ptx::shared_base();
  const uint32_t gate_result = base + kMoeLoopBytes<kRows>;
  const uint32_t flag = gate_result + kResultBytes<kRows>;
  const int splits = gridDim.y;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  ptx::wait_for_previous_launch();
  MoeBlock block;
  if (!find_block(p, p.intermediate / kBlockColumns, block)) return;

  const auto part = [&](int split, int projection) {
    const int64_t index = int64_t{2} * split + projection;
    return p.parts + (index * gridDim.x + blockIdx.x) * kPartFloats<kRows>;
  };
  Accumulators<kRows> sums;
#pragma unroll 1
  for (int projection = 0; projection < 2; ++projection) {
    const int64_t row =
        (int64_t{block.slice} * 2 + projection) * p.pairs() + block.tile.first_row;
    __syncthreads();  // gate's stages are read before up's are copied
    multiply_expert<kRows>(p, base, block, projection, p.w13,
                           p.rotated + row * p.hidden, p.hidden, sums);
    if (splits > 1) {
      store_part<kRows>(part(blockIdx.y, projection), sums);
    } else {
      __syncthreads();
      store_result<kRows>(projection == 0 ? gate_result : base, sums);
    }
  }
  ptx::allow_next_launch();
  if (splits > 1) {
    if (!arrive_last(p.counters + blockIdx.x, splits, flag)) return;
#pragma unroll 1
    for (int projection = 0; projection < 2; ++projection) {
      clear(sums);
      for (int i = 0; i < splits; ++i) add_part<kRows>(part(i, projection), sums);
      store_result<kRows>(projection == 0 ? gate_result : base, sums);
    }
  }
  __syncthreads();

  const int column = block.column_block * kBlockColumns + 4 * lane;
  float gate_scales[4], up_scales[4], next_scales[4];
  load_scales(p.svh13 + block.expert * 2 * p.intermediate + column, gate_scales);
  load_scales(p.svh13 + (block.expert * 2 + 1) * p.intermediate + column, up_scales);
  load_scales(p.suh2 + block.expert * p.intermediate + column, next_scales);
  for (int row = warp; row < block.tile.rows; row += kBlockWarps) {
    float gate[4], up[4];
    transformed_row(gate_result, row, gate_scales, gate);
    transformed_row(base, row, up_scales, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      up[i] = activate(gate[i], up[i], p.limit) * next_scales[i];
    }
    hadamard_128(up, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) up[i] *= kHadamardScale;
    count_clamped(p.clamped, clamp_to_half(up));
    const int64_t to = int64_t{block.slice} * p.pairs() + block.tile.first_row + row;
    ptx::store_global(
        reinterpret_cast<uint2*>(p.activated + to * p.intermediate + column),
        pack_half4(up));
  }
}

// Grid: (slices * max_tiles * hidden/128, splits).
template <int kRows>
__global__ void __launch_bounds__(kBlockThreads, kBlocksTogether<kRows>)
    moe_down_kernel(const MoeParams p) {
  const uint32_t base = ptx::shared_base();
  const uint32_t flag = base + kMoeLoopBytes<kRows>;
  const int splits = gridDim.y;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  ptx::wait_for_previous_launch();
  MoeBlock block;
  if (!find_block(p, p.hidden / kBlockColumns, block)) return;

  const int64_t first_row = int64_t{block.slice} * p.pairs() + block.tile.first_row;
  Accumulators<kRows> sums;
  multiply_expert<kRows>(p, base, block, 2, p.w2,
                         p.activated + first_row * p.intermediate, p.intermediate,
                         sums);
  ptx::allow_next_launch();
  if (splits > 1) {
    const auto part = [&](int split) {
      return p.parts + (int64_t{split} * gridDim.x + blockIdx.x) * kPartFloats<kRows>;
    };
    store_part<kRows>(part(blockIdx.y), sums);
    if (!arrive_last(p.counters + blockIdx.x, splits, flag)) return;
    clear(sums);
    for (int i = 0; i < splits; ++i) add_part<kRows>(part(i), sums);
  }
  __syncthreads();
  store_result<kRows>(base, sums);
  __syncthreads();

  const int column = block.column_block * kBlockColumns + 4 * lane;
  float scales[4];
  load_scales(p.svh2 + block.expert * p.hidden + column, scales);
  for (int row = warp; row < block.tile.rows; row += kBlockWarps) {
    float values[4];
    transformed_row(base, row, scales, values);
    store_four(p.products, (first_row + row) * p.hidden + column, true,
               ElementType::kFloat32, values);
  }
}

}  // namespace exl3
