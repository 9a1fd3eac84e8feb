// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The kernels' ops on CUDA, with the schemas of cpu_ops.cpp. Nothing here allocates but
// the result, and nothing waits for the GPU: the ops can be captured in CUDA graphs.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "exl3/launch/dequantize.h"
#include "exl3/launch/linear.h"
#include "exl3/launch/moe.h"
#include "exl3/launch/transform.h"
#include "exl3/torch/arguments.h"
#include "exl3/torch/cuda_device.h"

namespace {

using exl3::LinearArguments;
using exl3::LinearPlan;
using exl3::MoeParams;
using exl3::MoePlan;
using exl3::ops::Device;
using exl3::ops::kRowsAtOnce;
using exl3::ops::kTokensAtOnce;
using exl3::ops::Tensor;

int64_t element_bytes(exl3::ElementType type) {
  return type == exl3::ElementType::kFloat32 ? 4 : 2;
}

std::vector<exl3::Shard> launch_shards(
    const std::vector<exl3::ops::StoredShard>& stored) {
  std::vector<exl3::Shard> shards;
  for (const exl3::ops::StoredShard& shard : stored) {
    shards.push_back({static_cast<int>(shard.matrix.n), static_cast<int>(shard.skip),
                      static_cast<int>(shard.keep), shard.matrix.words,
                      shard.matrix.codebook});
  }
  return shards;
}

Tensor linear(const Tensor& x, const Tensor& trellis, const Tensor& suh,
              const Tensor& svh, const std::optional<Tensor>& bias,
              const std::vector<int64_t>& shards, bool exact, bool batch_invariant,
              int64_t workspace) {
  const exl3::ops::LinearCall call =
      exl3::ops::check_linear(x, trellis, suh, svh, bias, shards);
  const Device device(call.out);
  LinearArguments part{};
  part.trellis = call.trellis;
  part.suh = call.suh;
  part.svh = call.svh;
  part.bias = call.bias;
  part.type = call.type;
  part.width = static_cast<int>(call.width);
  part.k = static_cast<int>(call.k);
  part.shards = launch_shards(call.shards);
  const auto* source = static_cast<const char*>(call.x.const_data_ptr());
  auto* target = static_cast<char*>(call.out.mutable_data_ptr());
  for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    part.x = source + row * call.width * element_bytes(call.type);
    part.out = target + row * call.kept * element_bytes(call.type);
    part.rows = static_cast<int>(std::min(kRowsAtOnce, call.rows - row));
    const LinearPlan plan =
        exl3::choose_plan(part, device.gpu(), exact, batch_invariant);
    const size_t bytes = exl3::workspace_bytes(part, plan);
    void* memory = device.workspace("linear", workspace, bytes);
    exl3::linear(part, plan, memory, device.stream());
  }
  return call.out;
}

Tensor moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
           const Tensor& w13, const Tensor& w2, const Tensor& experts,
           const Tensor& suh13, const Tensor& svh13, const Tensor& suh2,
           const Tensor& svh2, int64_t slices, const std::optional<Tensor>& expert_map,
           const std::string& activation, double limit, bool /*exact: always*/,
           bool batch_invariant, int64_t workspace) {
  const exl3::ops::MoeCall call =
      exl3::ops::check_moe(x, topk_ids, topk_weights, w13, w2, experts, suh13, svh13,
                           suh2, svh2, slices, expert_map, activation, limit);
  const Device device(call.out);
  MoeParams part{};
  part.expert_map = call.expert_map;
  part.w13 = call.w13;
  part.w2 = call.w2;
  part.experts = call.experts;
  part.suh13 = call.suh13;
  part.svh13 = call.svh13;
  part.suh2 = call.suh2;
  part.svh2 = call.svh2;
  part.type = call.type;
  part.wide_ids = call.wide_ids;
  part.width = static_cast<int>(call.width);
  part.top_k = static_cast<int>(call.top_k);
  part.hidden = static_cast<int>(call.hidden);
  part.intermediate = static_cast<int>(call.intermediate);
  part.local_experts = static_cast<int>(call.virtual_experts / call.slices);
  part.slices = static_cast<int>(call.slices);
  part.routed_experts = static_cast<int>(call.routed_experts);
  part.limit = call.limit;
  const auto* source = static_cast<const char*>(call.x.const_data_ptr());
  const auto* ids = static_cast<const char*>(call.topk_ids.const_data_ptr());
  const auto* weights = static_cast<const float*>(call.topk_weights.const_data_ptr());
  auto* target = static_cast<char*>(call.out.mutable_data_ptr());
  const int64_t token_bytes = call.width * element_bytes(call.type);
  for (int64_t token = 0; token < call.tokens; token += kTokensAtOnce) {
    part.x = source + token * token_bytes;
    part.topk_ids = ids + token * call.top_k * (call.wide_ids ? 8 : 4);
    part.topk_weights = weights + token * call.top_k;
    part.out = target + token * token_bytes;
    part.tokens = static_cast<int>(std::min(kTokensAtOnce, call.tokens - token));
    const MoePlan plan =
        exl3::choose_moe_plan(part, device.gpu().multiprocessors, batch_invariant);
    const size_t bytes = exl3::moe_workspace_bytes(part, plan);
    void* memory = device.workspace("moe", workspace, bytes);
    exl3::moe(part, plan, memory, device.stream());
  }
  return call.out;
}

Tensor dequant(const Tensor& trellis, const std::optional<Tensor>& suh,
               const std::optional<Tensor>& svh, int64_t k, int64_t n, int64_t words,
               int64_t codebook) {
  const exl3::ops::DequantCall call =
      exl3::ops::check_dequant(trellis, suh, svh, k, n, words, codebook);
  const Device device(call.out);
  exl3::launch_dequantize(call.matrix.words, call.matrix.codebook, device.stream(),
                          {call.trellis, call.suh, call.svh,
                           static_cast<float*>(call.out.mutable_data_ptr()),
                           static_cast<int>(k), static_cast<int>(n)});
  return call.out;
}

Tensor hadamard(const Tensor& x, const std::optional<Tensor>& pre,
                const std::optional<Tensor>& post) {
  const exl3::ops::HadamardCall call = exl3::ops::check_hadamard(x, pre, post);
  const Device device(call.out);
  if (call.rows > 0) {
    exl3::launch_transform(
        device.stream(),
        {call.x.const_data_ptr(), call.pre, call.post, call.out.mutable_data_ptr(),
         call.type, call.type, static_cast<int>(call.rows),
         static_cast<int>(call.width), static_cast<int>(call.width), 1, 1, nullptr});
  }
  return call.out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exl3, EXL3_OPS_DEVICE, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("moe", TORCH_BOX(&moe));
  m.impl("dequant", TORCH_BOX(&dequant));
  m.impl("hadamard", TORCH_BOX(&hadamard));
}
