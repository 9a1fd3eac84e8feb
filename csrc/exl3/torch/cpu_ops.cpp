// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The kernels' ops: their schemas, which all devices share, and the CPU's.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "exl3/cpu/dequant.h"
#include "exl3/cpu/linear.h"
#include "exl3/cpu/moe.h"
#include "exl3/cpu/rotation.h"
#include "exl3/torch/arguments.h"

namespace {

using exl3::cpu::DType;
using exl3::cpu::Trellis;
using exl3::ops::MoeCall;
using exl3::ops::StoredMatrix;
using exl3::ops::Tensor;

void parallel(int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
  if (threads <= 1) {
    for (int64_t unit = 0; unit < count; ++unit) body(unit);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t unit; (unit = next.fetch_add(1)) < count;) body(unit);
  });
}

DType dtype_of(exl3::ElementType type) {
  switch (type) {
    case exl3::ElementType::kFloat32:
      return DType::kFloat32;
    case exl3::ElementType::kBFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat16;
  }
}

Trellis trellis_of(const uint16_t* slab, const StoredMatrix& matrix) {
  return {slab + matrix.first_word, matrix.k, matrix.words, matrix.codebook};
}

// The CPU's sums run in one order for any number of rows, and in memory of their own.
Tensor linear(const Tensor& x, const Tensor& trellis, const Tensor& suh,
              const Tensor& svh, const std::optional<Tensor>& bias,
              const std::vector<int64_t>& shards, bool exact, bool /*batch_invariant*/,
              int64_t /*workspace*/) {
  exl3::ops::LinearCall call =
      exl3::ops::check_linear(x, trellis, suh, svh, bias, shards);
  exl3::cpu::Linear layer{};
  layer.x = call.x.const_data_ptr();
  layer.bias = call.bias;
  layer.out = call.out.mutable_data_ptr();
  layer.dtype = dtype_of(call.type);
  layer.rows = call.rows;
  layer.width = call.width;
  layer.exact = exact;
  layer.isa = exl3::cpu::usable_isa();
  for (size_t i = 0; i < call.shards.size(); ++i) {
    const exl3::ops::StoredShard& shard = call.shards[i];
    layer.shards.push_back({trellis_of(call.trellis, shard.matrix),
                            call.suh + static_cast<int64_t>(i) * call.k,
                            call.svh + shard.first_column, shard.skip, shard.keep});
  }
  exl3::cpu::linear(layer, parallel);
  return call.out;
}

// Routed expert -> tokens, from the router's choice.
std::vector<std::vector<exl3::cpu::Route>> route(const MoeCall& call) {
  const int64_t local_experts = call.virtual_experts / call.slices;
  const void* ids = call.topk_ids.const_data_ptr();
  const auto* weights = static_cast<const float*>(call.topk_weights.const_data_ptr());
  std::vector<std::vector<exl3::cpu::Route>> routes(local_experts);
  for (int64_t i = 0; i < call.tokens * call.top_k; ++i) {
    int64_t expert = call.wide_ids ? static_cast<const int64_t*>(ids)[i]
                                   : static_cast<const int32_t*>(ids)[i];
    if (expert == -1) continue;
    STD_TORCH_CHECK(expert >= 0 && expert < call.routed_experts,
                    "exl3::moe: topk_ids has expert ", expert, " for token ",
                    i / call.top_k, "; the layer has experts 0 to ",
                    call.routed_experts - 1);
    if (call.expert_map != nullptr) {
      const int32_t mapped = call.expert_map[expert];
      STD_TORCH_CHECK(mapped >= -1 && mapped < local_experts,
                      "exl3::moe: expert_map sends expert ", expert, " to ", mapped,
                      "; this rank has local experts 0 to ", local_experts - 1);
      if (mapped == -1) continue;
      expert = mapped;
    }
    routes[expert].push_back({i / call.top_k, weights[i]});
  }
  return routes;
}

Tensor moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
           const Tensor& w13, const Tensor& w2, const Tensor& experts,
           const Tensor& suh13, const Tensor& svh13, const Tensor& suh2,
           const Tensor& svh2, int64_t slices, const std::optional<Tensor>& expert_map,
           const std::string& activation, double limit, bool exact,
           bool /*batch_invariant*/, int64_t /*workspace*/) {
  MoeCall call =
      exl3::ops::check_moe(x, topk_ids, topk_weights, w13, w2, experts, suh13, svh13,
                           suh2, svh2, slices, expert_map, activation, limit);
  exl3::cpu::Moe layer{};
  layer.x = call.x.const_data_ptr();
  layer.out = call.out.mutable_data_ptr();
  layer.dtype = dtype_of(call.type);
  layer.tokens = call.tokens;
  layer.width = call.width;
  layer.hidden = call.hidden;
  layer.intermediate = call.intermediate;
  layer.slices = call.slices;
  layer.limit = call.limit;
  layer.exact = exact;
  layer.isa = exl3::cpu::usable_isa();
  layer.routes = route(call);
  const int64_t hidden = call.hidden, intermediate = call.intermediate;
  for (int64_t v = 0; v < call.virtual_experts; ++v) {
    // For gate, up and down: offset, words, codebook.
    const int64_t* field = call.experts + v * 9;
    const auto matrix = [&](const uint16_t* slab, int64_t slab_words, const int64_t* at,
                            int64_t k, int64_t n) {
      return trellis_of(
          slab, exl3::ops::check_matrix("moe", slab_words, at[0], k, n, at[1], at[2]));
    };
    layer.experts.push_back({
        matrix(call.w13, call.w13_words, field, hidden, intermediate),
        matrix(call.w13, call.w13_words, field + 3, hidden, intermediate),
        matrix(call.w2, call.w2_words, field + 6, intermediate, hidden),
        call.suh13 + v * 2 * hidden,
        call.svh13 + v * 2 * intermediate,
        call.suh2 + v * intermediate,
        call.svh2 + v * hidden,
    });
  }
  exl3::cpu::moe(layer, parallel);
  return call.out;
}

Tensor dequant(const Tensor& trellis, const std::optional<Tensor>& suh,
               const std::optional<Tensor>& svh, int64_t k, int64_t n, int64_t words,
               int64_t codebook) {
  exl3::ops::DequantCall call =
      exl3::ops::check_dequant(trellis, suh, svh, k, n, words, codebook);
  exl3::cpu::dequant(trellis_of(call.trellis, call.matrix), n, call.suh, call.svh,
                     call.out.mutable_data_ptr<float>(), exl3::cpu::usable_isa(),
                     parallel);
  return call.out;
}

Tensor hadamard(const Tensor& x, const std::optional<Tensor>& pre,
                const std::optional<Tensor>& post) {
  constexpr int64_t kBlock = exl3::cpu::kHadamardBlock;
  exl3::ops::HadamardCall call = exl3::ops::check_hadamard(x, pre, post);
  const DType dtype = dtype_of(call.type);
  const auto* source = static_cast<const char*>(call.x.const_data_ptr());
  void* target = call.out.mutable_data_ptr();
  const int64_t bytes = dtype == DType::kFloat32 ? 4 : 2;
  const auto& rotation = exl3::cpu::select_rotation(exl3::cpu::usable_isa());
  parallel(call.rows * call.width / kBlock, [&](int64_t block) {
    const int64_t first = block * kBlock;
    const int64_t column = first % call.width;
    float values[kBlock];
    rotation.input(source + first * bytes, dtype, kBlock,
                   call.pre ? call.pre + column : nullptr, kBlock, values);
    if (call.post != nullptr) {
      for (int i = 0; i < kBlock; ++i) {
        values[i] *= exl3::cpu::half_to_float(call.post[column + i]);
      }
    }
    rotation.store(values, kBlock, target, first, dtype);
  });
  return call.out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def(
      "linear(Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor? bias, "
      "int[] shards, bool exact=False, bool batch_invariant=False, "
      "int workspace=0) -> Tensor");
  m.def(
      "moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2, "
      "Tensor experts, Tensor suh13, Tensor svh13, Tensor suh2, Tensor svh2, "
      "int slices, Tensor? expert_map, str activation, float limit, "
      "bool exact=False, bool batch_invariant=False, int workspace=0) -> Tensor");
  m.def(
      "dequant(Tensor trellis, Tensor? suh, Tensor? svh, int k, int n, int words, "
      "int codebook) -> Tensor");
  m.def("hadamard(Tensor x, Tensor? pre, Tensor? post) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("moe", TORCH_BOX(&moe));
  m.impl("dequant", TORCH_BOX(&dequant));
  m.impl("hadamard", TORCH_BOX(&hadamard));
}
