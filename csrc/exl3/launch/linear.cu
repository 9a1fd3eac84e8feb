// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The launches of one linear op.
#include <algorithm>

#include "exl3/launch/linear.h"
#include "exl3/launch/transform.h"

namespace exl3 {
namespace {

int copies(const LinearPlan& plan) { return plan.unrounded ? 2 : 1; }

size_t activation_bytes(const LinearArguments& a, const LinearPlan& plan) {
  return a.shards.size() * static_cast<size_t>(a.rows) * a.k * copies(plan) *
         sizeof(uint16_t);
}

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
// or stages for, and for unrounded weights where they are unwanted or unknown.
LinearPlan allowed(const LinearArguments& a, LinearPlan plan, bool exact) {
  for (const Shard& shard : a.shards) exact |= shard.codebook == Codebook::kMul1;
  plan.unrounded = plan.unrounded && !exact;
  const size_t tiles = size_t(row_blocks(a, plan)) * column_blocks(a);
  if (tiles * sizeof(unsigned) > kCounterBytes) plan.splits = 1;
  plan.splits = std::min(plan.splits, a.k / kStageDepth);
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
  return kHeadBytes + activation_bytes(a, plan) + parts;
}

void linear(const LinearArguments& a, const LinearPlan& plan, void* workspace,
            Stream stream) {
  auto* bytes = static_cast<char*>(workspace);
  auto* activations = reinterpret_cast<uint16_t*>(bytes + kHeadBytes);
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
  transform.copies = copies(plan);
  transform.clamped = clamped_of(workspace);
  launch_transform(stream, transform);

  GemmParams common{};
  common.activations = activations;
  common.trellis = a.trellis;
  common.svh = a.svh;
  common.bias = a.bias;
  common.out = a.out;
  common.counters = counters_of(workspace);
  common.parts =
      reinterpret_cast<float*>(bytes + kHeadBytes + activation_bytes(a, plan));
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
