// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Which rows each expert has. A warp for each local expert looks through all pairs: the
// order is the pairs' own, so nothing depends on which warp was first.
#pragma once

#include "exl3/kernels/hadamard.cuh"
#include "exl3/kernels/moe_params.h"

namespace exl3 {

// The local expert of a pair, or -1.
__device__ __forceinline__ int local_expert(const MoeParams& p, int pair) {
  const int64_t id =
      p.wide_ids ? ptx::load_global(static_cast<const int64_t*>(p.topk_ids) + pair)
                 : ptx::load_global(static_cast<const int32_t*>(p.topk_ids) + pair);
  if (id < 0 || id >= p.routed_experts) return -1;
  const int local = p.expert_map == nullptr ? static_cast<int>(id)
                                            : ptx::load_constant(p.expert_map + id);
  return local < p.local_experts ? local : -1;
}

// Grid: a warp for each local expert.
__global__ void __launch_bounds__(kBlockThreads) moe_count_kernel(MoeParams p) {
  const int expert = blockIdx.x * kBlockWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  ptx::allow_next_launch();
  ptx::wait_for_previous_launch();
  if (expert >= p.local_experts) return;
  int count = 0;
  for (int first = 0; first < p.pairs(); first += 32) {
    const int pair = first + lane;
    const bool mine = pair < p.pairs() && local_expert(p, pair) == expert;
    count += __popc(__ballot_sync(kFullWarp, mine));
  }
  if (lane == 0) ptx::store_global(p.counts + expert, count);
}

__device__ __forceinline__ int warp_sum(int value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

// Grid: a warp for each local expert, and one for the pairs that have none.
__global__ void __launch_bounds__(kBlockThreads) moe_place_kernel(MoeParams p) {
  const int expert = blockIdx.x * kBlockWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  ptx::allow_next_launch();
  ptx::wait_for_previous_launch();
  if (expert > p.local_experts) return;
  int first_row = 0;
  int first_tile = 0;
  for (int other = lane; other < expert; other += 32) {
    const int count = ptx::load_global(p.counts + other);
    first_row += count;
    first_tile += (count + p.block_rows - 1) / p.block_rows;
  }
  first_row = warp_sum(first_row);
  first_tile = warp_sum(first_tile);
  const bool none = expert == p.local_experts;
  if (none && lane == 0) {
    ptx::store_global(&p.totals->tiles, first_tile);
    ptx::store_global(&p.totals->rows, first_row);
  }

  const int wanted = none ? -1 : expert;
  int row = first_row;
  for (int first = 0; first < p.pairs(); first += 32) {
    const int pair = first + lane;
    const bool mine = pair < p.pairs() && local_expert(p, pair) == wanted;
    const uint32_t lanes = __ballot_sync(kFullWarp, mine);
    const int my_row = row + __popc(lanes & ((1u << lane) - 1));
    if (mine) ptx::store_global(p.pair_row + pair, none ? -1 : my_row);
    if (mine && !none) {
      ptx::store_global(p.row_pair + my_row, pair);
      ptx::store_global(p.row_expert + my_row, expert);
    }
    row += __popc(lanes);
  }
  if (none) return;
  const int rows = row - first_row;
  for (int i = lane; i * p.block_rows < rows; i += 32) {
    const int start = i * p.block_rows;
    const MoeTile tile{expert, first_row + start, min(p.block_rows, rows - start), 0};
    ptx::store_global(p.tiles + first_tile + i, tile);
  }
}

}  // namespace exl3
