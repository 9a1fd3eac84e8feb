// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The launches of one linear op.
#include <algorithm>

#include "exl3/kernels/pipeline.cuh"
#include "exl3/launch/linear.h"
#include "exl3/launch/transform.h"

namespace exl3 {
namespace {

// What all shards' activations are for. Shards that need different ones have exact
// weights.
Decoder decoder_for(const LinearArguments& a, const LinearPlan& plan) {
  const Decoder exact = decoder_of(a.shards[0].codebook);
  return plan.unrounded ? unrounded(exact) : exact;
}

// Where the parts of the workspace behind its head are.
struct Layout {
  Layout(const LinearArguments& a, const LinearPlan& plan) {
    const size_t rows = a.shards.size() * a.rows;
    const Decoder decoder = decoder_for(a, plan);
    stage_sums = kHeadBytes + rows * a.k * copies_of(decoder) * sizeof(uint16_t);
    const bool integers = decoder == Decoder::kIntegers;
    scales = stage_sums + (integers ? rows * (a.k / kStageDepth) * sizeof(int) : 0);
    const size_t end = scales + (integers ? rows * sizeof(float) : 0);
    parts = (end + 15) / 16 * 16;
  }
  size_t activations = kHeadBytes;
  size_t stage_sums, scales, parts;
};

int row_blocks(const LinearArguments& a, const LinearPlan& plan) {
  return (a.rows + plan.block_rows - 1) / plan.block_rows;
}

int column_blocks(const LinearArguments& a) {
  int columns = 0;
  for (const Shard& shard : a.shards) columns += shard.n;
  return columns / kBlockColumns;
}

// One launch takes shards of one kind of tile, at most kMaxShards.
bool fits(const GemmParams& params, const Shard& first, const Shard& shard) {
  return params.num_shards < kMaxShards && first.words == shard.words &&
         first.codebook == shard.codebook;
}

// A measured plan that this call can have: it may ask for more than there are counters
// or stages for, and for unrounded weights where they are unwanted or can't be had.
LinearPlan allowed(const LinearArguments& a, LinearPlan plan, bool exact) {
  for (const Shard& shard : a.shards) {
    exact |= decoder_of(shard.codebook) != decoder_of(a.shards[0].codebook);
  }
  plan.unrounded = plan.unrounded && !exact;
  const size_t tiles = size_t(row_blocks(a, plan)) * column_blocks(a);
  if (tiles * sizeof(unsigned) > kCounterBytes) plan.splits = 1;
  const int stages = a.k / kStageDepth;
  plan.splits = std::min(plan.splits, stages);
  if (decoder_for(a, plan) == Decoder::kIntegers &&
      (stages + plan.splits - 1) / plan.splits * kStageDepth > kLongestIntegers) {
    plan.unrounded = false;
  }
  return plan;
}

}  // namespace

LinearPlan choose_plan(const LinearArguments& a, const Gpu& gpu, bool exact,
                       bool batch_invariant) {
  if (!batch_invariant) {
    const int n = column_blocks(a) * kBlockColumns;
    const auto measured = measured_plan(gpu.architecture, a.rows, a.k, n);
    if (measured) return allowed(a, *measured, exact);
  }
  LinearPlan plan{128, 1, false};
  for (const int rows : {64, 48, 32, 16}) {
    if (a.rows <= rows) plan.block_rows = rows;
  }
  // The order of additions over k is the same for every block_rows; only splits
  // change it.
  if (batch_invariant) return plan;
  const int tiles = row_blocks(a, plan) * column_blocks(a);
  constexpr int kShortest = 512;  // of k: below it the partial sums cost more
  while (plan.splits < kMaxSplits && tiles * plan.splits < 2 * gpu.multiprocessors &&
         a.k / (2 * plan.splits) >= kShortest &&
         tiles * sizeof(unsigned) <= kCounterBytes) {
    plan.splits *= 2;
  }
  return plan;
}

size_t workspace_bytes(const LinearArguments& a, const LinearPlan& plan) {
  size_t parts = 0;
  if (plan.splits > 1) {
    parts = sizeof(float) * plan.splits * row_blocks(a, plan) * column_blocks(a) *
            plan.block_rows * kBlockColumns;
  }
  return Layout(a, plan).parts + parts;
}

void linear(const LinearArguments& a, const LinearPlan& plan, void* workspace,
            Stream stream) {
  auto* bytes = static_cast<char*>(workspace);
  const Layout layout(a, plan);
  auto* activations = reinterpret_cast<uint16_t*>(bytes + layout.activations);
  auto* scales = reinterpret_cast<float*>(bytes + layout.scales);
  auto* stage_sums = reinterpret_cast<int*>(bytes + layout.stage_sums);
  TransformParams transform{};
  transform.x = a.x;
  transform.pre = a.suh;
  transform.out = activations;
  transform.x_type = a.type;
  transform.out_type = ElementType::kFloat16;
  transform.rows = a.rows;
  transform.width = a.width;
  transform.k = a.k;
  transform.num_slabs = static_cast<int>(a.shards.size());
  transform.copies = copies_of(decoder_for(a, plan));
  transform.clamped = clamped_of(workspace);
  if (decoder_for(a, plan) == Decoder::kIntegers) {
    launch_quantize(stream, {transform, scales, stage_sums});
  } else {
    launch_transform(stream, transform);
  }

  GemmParams common{};
  common.activations = activations;
  common.trellis = a.trellis;
  common.svh = a.svh;
  common.bias = a.bias;
  common.out = a.out;
  common.counters = counters_of(workspace);
  common.scales = scales;
  common.stage_sums = stage_sums;
  common.parts = reinterpret_cast<float*>(bytes + layout.parts);
  common.type = a.type;
  common.rows = a.rows;
  common.k = a.k;
  common.row_blocks = row_blocks(a, plan);
  for (const Shard& shard : a.shards) common.out_columns += shard.keep;

  std::vector<bool> done(a.shards.size());
  for (size_t first = 0; first < a.shards.size(); ++first) {
    if (done[first]) continue;
    GemmParams params = common;
    int64_t trellis = 0;
    int64_t out_first = 0;
    int svh = 0;
    for (size_t i = 0; i < a.shards.size(); ++i) {
      const Shard& shard = a.shards[i];
      if (!done[i] && i >= first && fits(params, a.shards[first], shard)) {
        done[i] = true;
        params.shards[params.num_shards++] = {trellis,
                                              out_first - shard.skip,
                                              svh,
                                              static_cast<int>(i),
                                              params.column_blocks,
                                              shard.skip,
                                              shard.skip + shard.keep};
        params.column_blocks += shard.n / kBlockColumns;
      }
      trellis += int64_t{shard.n} / kTileSide * (a.k / kTileSide) * shard.words;
      out_first += shard.keep;
      svh += shard.n;
    }
    launch_gemm(a.shards[first].words, a.shards[first].codebook, plan, stream, params);
  }
}

}  // namespace exl3
