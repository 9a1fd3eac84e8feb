// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The launches of one op of routed experts.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "exl3/kernels/moe_route.cuh"
#include "exl3/kernels/moe_rows.cuh"
#include "exl3/launch/launch.cuh"
#include "exl3/launch/moe.h"

namespace exl3 {
namespace {

// Every expert may have one tile that isn't full.
int tile_bound(const MoeParams& p, int block_rows) {
  return p.pairs() / block_rows + std::min(p.pairs(), p.local_experts);
}

int64_t products_blocks(const MoeParams& p, int tiles, int columns) {
  return int64_t{p.slices} * tiles * (columns / kBlockColumns);
}

int choose_splits(int64_t blocks, int k, int multiprocessors) {
  constexpr int kShortest = 512;  // of k: below it the partial sums cost more
  int splits = 1;
  while (splits < 8 && blocks * splits < 2 * multiprocessors &&
         k / (2 * splits) >= kShortest && blocks * sizeof(unsigned) <= kCounterBytes) {
    splits *= 2;
  }
  return splits;
}

template <class Launch16, class Launch32, class Launch64>
void by_rows(int block_rows, Launch16 launch16, Launch32 launch32, Launch64 launch64) {
  switch (block_rows) {
    case 16:
      return launch16();
    case 32:
      return launch32();
    case 64:
      return launch64();
    default:
      throw std::runtime_error("exl3: no kernel of experts has blocks of " +
                               std::to_string(block_rows) + " rows");
  }
}

LaunchShape warps(int64_t count) {
  LaunchShape shape;
  shape.blocks_x = static_cast<unsigned>((count + kBlockWarps - 1) / kBlockWarps);
  shape.threads = kBlockThreads;
  return shape;
}

// Hands out a workspace in parts that begin at multiples of 256 bytes.
class Parts {
 public:
  explicit Parts(void* workspace) : next_(static_cast<char*>(workspace)) {}

  template <class T>
  void give(T*& part, int64_t count) {
    part = reinterpret_cast<T*>(next_);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    next_ += (bytes + 255) / 256 * 256;
  }
  char* end() const { return next_; }

 private:
  char* next_;
};

}  // namespace

MoePlan choose_moe_plan(const MoeParams& p, int multiprocessors, bool batch_invariant) {
  // Rows that an expert has on average, with what a mean hides: some have twice that.
  const int64_t rows = int64_t{p.pairs()} / std::max(1, p.local_experts);
  MoePlan plan{rows > 32 ? 64 : rows > 12 ? 32 : 16, 1, 1};
  if (batch_invariant) return plan;
  const int tiles = tile_bound(p, plan.block_rows);
  plan.gate_up_splits = choose_splits(products_blocks(p, tiles, p.intermediate),
                                      p.hidden, multiprocessors);
  plan.down_splits = choose_splits(products_blocks(p, tiles, p.hidden), p.intermediate,
                                   multiprocessors);
  return plan;
}

char* lay_out_workspace(MoeParams& p, const MoePlan& plan, void* workspace) {
  p.block_rows = plan.block_rows;
  p.max_tiles = tile_bound(p, plan.block_rows);
  const int64_t pairs = p.pairs();
  const int64_t part = int64_t{plan.block_rows} * kBlockColumns;
  int64_t parts = 0;
  if (plan.gate_up_splits > 1) {
    parts = part * 2 * plan.gate_up_splits *
            products_blocks(p, p.max_tiles, p.intermediate);
  }
  if (plan.down_splits > 1) {
    parts = std::max(
        parts, part * plan.down_splits * products_blocks(p, p.max_tiles, p.hidden));
  }
  p.clamped = clamped_of(workspace);
  p.counters = counters_of(workspace);
  Parts rest(static_cast<char*>(workspace) + kHeadBytes);
  rest.give(p.counts, p.local_experts);
  rest.give(p.totals, 1);
  rest.give(p.tiles, p.max_tiles);
  rest.give(p.row_pair, pairs);
  rest.give(p.row_expert, pairs);
  rest.give(p.pair_row, pairs);
  rest.give(p.rotated, 2 * p.slices * pairs * p.hidden);
  rest.give(p.activated, p.slices * pairs * p.intermediate);
  rest.give(p.products, p.slices * pairs * p.hidden);
  rest.give(p.parts, parts);
  return rest.end();
}

size_t moe_workspace_bytes(const MoeParams& params, const MoePlan& plan) {
  MoeParams p = params;
  // Sizes only: the addresses are never used.
  alignas(256) static char start[kHeadBytes];
  return static_cast<size_t>(lay_out_workspace(p, plan, start) - start);
}

void moe(MoeParams p, const MoePlan& plan, void* workspace, Stream stream) {
  lay_out_workspace(p, plan, workspace);
  const int64_t pieces = p.hidden / kHadamardBlock;
  launch(&moe_count_kernel, warps(p.local_experts), stream, p);
  launch(&moe_place_kernel, warps(p.local_experts + 1), stream, p);
  launch(&moe_rotate_kernel, warps(int64_t{p.slices} * p.pairs() * pieces), stream, p);
  by_rows(
      plan.block_rows, [&] { launch_moe_gate_up<16>(plan.gate_up_splits, stream, p); },
      [&] { launch_moe_gate_up<32>(plan.gate_up_splits, stream, p); },
      [&] { launch_moe_gate_up<64>(plan.gate_up_splits, stream, p); });
  by_rows(
      plan.block_rows, [&] { launch_moe_down<16>(plan.down_splits, stream, p); },
      [&] { launch_moe_down<32>(plan.down_splits, stream, p); },
      [&] { launch_moe_down<64>(plan.down_splits, stream, p); });
  launch(&moe_combine_kernel, warps(int64_t{p.tokens} * pieces), stream, p);
}

}  // namespace exl3
