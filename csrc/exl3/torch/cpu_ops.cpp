// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The kernels' ops on the CPU. Arguments are checked here, once, so that the kernels
// can rely on them; each message names the op, the argument, what it is and what it
// should be.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "exl3/cpu/dequant.h"
#include "exl3/cpu/linear.h"
#include "exl3/cpu/moe.h"
#include "exl3/cpu/rotation.h"

namespace {

using exl3::Codebook;
using exl3::kTileSide;
using exl3::cpu::DType;
using exl3::cpu::kHadamardBlock;
using exl3::cpu::Trellis;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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

template <typename Sizes>
std::string text(const Sizes& sizes) {
  std::string list;
  for (int64_t size : sizes) list += (list.empty() ? "" : ", ") + std::to_string(size);
  return "[" + list + "]";
}

DType activation_type(const char* op, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, "exl3::", op, ": x is ",
                      torch::headeronly::toString(x.scalar_type()),
                      "; pass float32, bfloat16 or float16");
  }
}

// Checks a tensor that a kernel reads as it lies: contiguous, of this dtype and shape.
const void* checked(const char* op, const char* name, const Tensor& tensor,
                    ScalarType dtype, const std::vector<int64_t>& shape) {
  bool same = tensor.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; same && i < shape.size(); ++i) same = tensor.size(i) == shape[i];
  STD_TORCH_CHECK(same, "exl3::", op, ": ", name, " has shape ", text(tensor.sizes()),
                  "; expected ", text(shape));
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, "exl3::", op, ": ", name, " is ",
                  torch::headeronly::toString(tensor.scalar_type()), "; expected ",
                  torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(tensor.is_contiguous(), "exl3::", op, ": ", name,
                  " is not contiguous; call .contiguous() once, when loading");
  return tensor.const_data_ptr();
}

const uint16_t* checked_halves(const char* op, const char* name, const Tensor& tensor,
                               const std::vector<int64_t>& shape) {
  return static_cast<const uint16_t*>(
      checked(op, name, tensor, ScalarType::Half, shape));
}

void check_blocks(const char* op, const char* name, int64_t size) {
  STD_TORCH_CHECK(size > 0 && size % kHadamardBlock == 0, "exl3::", op, ": ", name,
                  " is ", size, "; EXL3 stores multiples of ", kHadamardBlock);
}

// A matrix [k, n] at word `offset` of a slab.
Trellis checked_trellis(const char* op, const Tensor& slab, int64_t offset, int64_t k,
                        int64_t n, int64_t words, int64_t codebook) {
  STD_TORCH_CHECK(exl3::legal_words(words, codebook), "exl3::", op, ": ", words,
                  " words a tile with codebook ", codebook,
                  " do not exist; see exl3/codec/trellis.h for those that do");
  const int64_t size = (k / kTileSide) * (n / kTileSide) * words;
  STD_TORCH_CHECK(offset >= 0 && offset <= slab.numel() - size, "exl3::", op,
                  ": a matrix [", k, ", ", n, "] of ", words, " words a tile needs ",
                  size, " words from offset ", offset, "; the slab has ", slab.numel());
  return {static_cast<const uint16_t*>(slab.const_data_ptr()) + offset, k,
          static_cast<int>(words), static_cast<Codebook>(codebook)};
}

Tensor linear(const Tensor& x_given, const Tensor& trellis, const Tensor& suh,
              const Tensor& svh, const std::optional<Tensor>& bias,
              const std::vector<int64_t>& shards, bool exact) {
  constexpr const char* kOp = "linear";
  constexpr size_t kFields = 5;
  const DType dtype = activation_type(kOp, x_given);
  STD_TORCH_CHECK(x_given.dim() >= 1, "exl3::linear: x has no dimensions");
  STD_TORCH_CHECK(!shards.empty() && shards.size() % kFields == 0,
                  "exl3::linear: shards has ", shards.size(),
                  " numbers; pass n, skip, keep, words, codebook for each shard");
  const int64_t num_shards = shards.size() / kFields;
  STD_TORCH_CHECK(suh.dim() == 2, "exl3::linear: suh has shape ", text(suh.sizes()),
                  "; expected [shards, stored k]");
  const int64_t k = suh.size(1);
  const int64_t width = x_given.size(x_given.dim() - 1);
  check_blocks(kOp, "stored k", k);
  STD_TORCH_CHECK(width <= k, "exl3::linear: x has ", width,
                  " features; the weights store ", k);
  checked(kOp, "trellis", trellis, ScalarType::Short, {trellis.numel()});
  const uint16_t* suh_data = checked_halves(kOp, "suh", suh, {num_shards, k});

  exl3::cpu::Linear layer{};
  layer.dtype = dtype;
  layer.width = width;
  layer.exact = exact;
  layer.isa = exl3::cpu::usable_isa();
  int64_t offset = 0;
  int64_t stored = 0;
  int64_t kept = 0;
  const auto* svh_data = static_cast<const uint16_t*>(svh.const_data_ptr());
  for (int64_t i = 0; i < num_shards; ++i) {
    const int64_t* field = shards.data() + i * kFields;
    const int64_t n = field[0], skip = field[1], keep = field[2];
    check_blocks(kOp, "a shard's stored n", n);
    STD_TORCH_CHECK(skip >= 0 && keep >= 0 && skip <= n && keep <= n - skip,
                    "exl3::linear: shard ", i, " keeps columns ", skip, " to ",
                    skip + keep, " of ", n);
    const Trellis w = checked_trellis(kOp, trellis, offset, k, n, field[3], field[4]);
    layer.shards.push_back({w, suh_data + i * k, svh_data + stored, skip, keep});
    offset += (k / kTileSide) * (n / kTileSide) * w.words;
    stored += n;
    kept += keep;
  }
  STD_TORCH_CHECK(offset == trellis.numel(), "exl3::linear: trellis has ",
                  trellis.numel(), " words; its shards have ", offset);
  checked_halves(kOp, "svh", svh, {stored});
  if (bias.has_value()) {
    layer.bias = checked(kOp, "bias", *bias, x_given.scalar_type(), {kept});
  }

  const Tensor x = torch::stable::contiguous(x_given);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = kept;
  Tensor out = torch::stable::new_empty(x, shape);
  layer.x = x.const_data_ptr();
  layer.out = out.mutable_data_ptr();
  layer.rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) layer.rows *= shape[i];
  exl3::cpu::linear(layer, parallel);
  return out;
}

// Routed expert -> tokens, from the router's choice.
std::vector<std::vector<exl3::cpu::Route>> route(const Tensor& topk_ids,
                                                 const Tensor& topk_weights,
                                                 const std::optional<Tensor>& map,
                                                 int64_t local_experts) {
  const int64_t tokens = topk_ids.size(0);
  const int64_t top_k = topk_ids.size(1);
  const bool wide = topk_ids.scalar_type() == ScalarType::Long;
  const void* ids = checked("moe", "topk_ids", topk_ids,
                            wide ? ScalarType::Long : ScalarType::Int, {tokens, top_k});
  const auto* weights = static_cast<const float*>(
      checked("moe", "topk_weights", topk_weights, ScalarType::Float, {tokens, top_k}));
  const int32_t* local = nullptr;
  int64_t global_experts = local_experts;
  if (map.has_value()) {
    global_experts = map->numel();
    local = static_cast<const int32_t*>(
        checked("moe", "expert_map", *map, ScalarType::Int, {global_experts}));
  }
  std::vector<std::vector<exl3::cpu::Route>> routes(local_experts);
  for (int64_t i = 0; i < tokens * top_k; ++i) {
    int64_t expert = wide ? static_cast<const int64_t*>(ids)[i]
                          : static_cast<const int32_t*>(ids)[i];
    if (expert == -1) continue;
    STD_TORCH_CHECK(expert >= 0 && expert < global_experts,
                    "exl3::moe: topk_ids has expert ", expert, " for token ", i / top_k,
                    "; the layer has experts 0 to ", global_experts - 1);
    if (local != nullptr) {
      const int32_t mapped = local[expert];
      STD_TORCH_CHECK(mapped >= -1 && mapped < local_experts,
                      "exl3::moe: expert_map sends expert ", expert, " to ", mapped,
                      "; this rank has local experts 0 to ", local_experts - 1);
      if (mapped == -1) continue;
      expert = mapped;
    }
    routes[expert].push_back({i / top_k, weights[i]});
  }
  return routes;
}

Tensor moe(const Tensor& x_given, const Tensor& topk_ids, const Tensor& topk_weights,
           const Tensor& w13, const Tensor& w2, const Tensor& experts,
           const Tensor& suh13, const Tensor& svh13, const Tensor& suh2,
           const Tensor& svh2, int64_t slices, const std::optional<Tensor>& expert_map,
           const std::string& activation, double limit, bool exact) {
  constexpr const char* kOp = "moe";
  constexpr int64_t kProjections = 3;
  constexpr int64_t kFields = 3;
  exl3::cpu::Moe layer{};
  layer.dtype = activation_type(kOp, x_given);
  STD_TORCH_CHECK(x_given.dim() == 2, "exl3::moe: x has shape ", text(x_given.sizes()),
                  "; expected [tokens, hidden]");
  STD_TORCH_CHECK(activation == "silu", "exl3::moe: activation is '", activation,
                  "'; only 'silu' is implemented");
  STD_TORCH_CHECK(limit > 0, "exl3::moe: limit is ", limit,
                  "; pass a positive number, or infinity for none");
  STD_TORCH_CHECK(suh13.dim() == 3 && suh2.dim() == 2, "exl3::moe: suh13 has shape ",
                  text(suh13.sizes()), " and suh2 ", text(suh2.sizes()),
                  "; expected [virtual experts, 2, hidden] and [virtual experts, "
                  "intermediate]");
  const int64_t count = suh13.size(0);
  const int64_t hidden = suh13.size(2);
  const int64_t intermediate = suh2.size(1);
  check_blocks(kOp, "stored hidden", hidden);
  check_blocks(kOp, "stored intermediate", intermediate);
  STD_TORCH_CHECK(slices > 0 && count > 0 && count % slices == 0, "exl3::moe: ", count,
                  " virtual experts are no whole number of experts of ", slices,
                  " slices");
  const auto* table = static_cast<const int64_t*>(checked(
      kOp, "experts", experts, ScalarType::Long, {count, kProjections, kFields}));
  const uint16_t* suh13_data = checked_halves(kOp, "suh13", suh13, {count, 2, hidden});
  const uint16_t* svh13_data =
      checked_halves(kOp, "svh13", svh13, {count, 2, intermediate});
  const uint16_t* suh2_data = checked_halves(kOp, "suh2", suh2, {count, intermediate});
  const uint16_t* svh2_data = checked_halves(kOp, "svh2", svh2, {count, hidden});
  checked(kOp, "w13", w13, ScalarType::Short, {w13.numel()});
  checked(kOp, "w2", w2, ScalarType::Short, {w2.numel()});

  const Tensor x = torch::stable::contiguous(x_given);
  layer.tokens = x.size(0);
  layer.width = x.size(1);
  STD_TORCH_CHECK(layer.width <= hidden, "exl3::moe: x has ", layer.width,
                  " features; the experts store ", hidden);
  STD_TORCH_CHECK(topk_ids.dim() == 2 && topk_ids.size(0) == layer.tokens,
                  "exl3::moe: topk_ids has shape ", text(topk_ids.sizes()), " for ",
                  layer.tokens, " tokens; expected [tokens, top_k]");
  layer.hidden = hidden;
  layer.intermediate = intermediate;
  layer.slices = slices;
  layer.limit = static_cast<float>(limit);
  layer.exact = exact;
  layer.isa = exl3::cpu::usable_isa();
  layer.routes =
      route(contiguous(topk_ids), contiguous(topk_weights), expert_map, count / slices);
  for (int64_t v = 0; v < count; ++v) {
    const int64_t* field = table + v * kProjections * kFields;
    const auto matrix = [&](const Tensor& slab, const int64_t* at, int64_t k,
                            int64_t n) {
      return checked_trellis(kOp, slab, at[0], k, n, at[1], at[2]);
    };
    layer.experts.push_back({
        matrix(w13, field, hidden, intermediate),
        matrix(w13, field + kFields, hidden, intermediate),
        matrix(w2, field + 2 * kFields, intermediate, hidden),
        suh13_data + v * 2 * hidden,
        svh13_data + v * 2 * intermediate,
        suh2_data + v * intermediate,
        svh2_data + v * hidden,
    });
  }

  Tensor out = torch::stable::new_empty(x, x.sizes());
  layer.x = x.const_data_ptr();
  layer.out = out.mutable_data_ptr();
  exl3::cpu::moe(layer, parallel);
  return out;
}

Tensor dequant(const Tensor& trellis, const std::optional<Tensor>& suh,
               const std::optional<Tensor>& svh, int64_t k, int64_t n, int64_t words,
               int64_t codebook) {
  constexpr const char* kOp = "dequant";
  check_blocks(kOp, "k", k);
  check_blocks(kOp, "n", n);
  checked(kOp, "trellis", trellis, ScalarType::Short, {trellis.numel()});
  const Trellis w = checked_trellis(kOp, trellis, 0, k, n, words, codebook);
  STD_TORCH_CHECK((k / kTileSide) * (n / kTileSide) * words == trellis.numel(),
                  "exl3::dequant: trellis has ", trellis.numel(), " words; a matrix [",
                  k, ", ", n, "] of ", words, " words a tile has ",
                  (k / kTileSide) * (n / kTileSide) * words);
  const uint16_t* left = suh ? checked_halves(kOp, "suh", *suh, {k}) : nullptr;
  const uint16_t* right = svh ? checked_halves(kOp, "svh", *svh, {n}) : nullptr;
  Tensor out = torch::stable::new_empty(trellis, {k, n}, ScalarType::Float);
  exl3::cpu::dequant(w, n, left, right, out.mutable_data_ptr<float>(),
                     exl3::cpu::usable_isa(), parallel);
  return out;
}

Tensor hadamard(const Tensor& x_given, const std::optional<Tensor>& pre,
                const std::optional<Tensor>& post) {
  constexpr const char* kOp = "hadamard";
  const DType dtype = activation_type(kOp, x_given);
  STD_TORCH_CHECK(x_given.dim() >= 1, "exl3::hadamard: x has no dimensions");
  const int64_t width = x_given.size(x_given.dim() - 1);
  check_blocks(kOp, "x's last dimension", width);
  const uint16_t* before = pre ? checked_halves(kOp, "pre", *pre, {width}) : nullptr;
  const uint16_t* after = post ? checked_halves(kOp, "post", *post, {width}) : nullptr;
  const Tensor x = torch::stable::contiguous(x_given);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  const auto* source = static_cast<const char*>(x.const_data_ptr());
  void* target = out.mutable_data_ptr();
  const int64_t bytes = dtype == DType::kFloat32 ? 4 : 2;
  const auto& rotation = exl3::cpu::select_rotation(exl3::cpu::usable_isa());
  parallel(x.numel() / kHadamardBlock, [&](int64_t block) {
    const int64_t first = block * kHadamardBlock;
    const int64_t column = first % width;
    float values[kHadamardBlock];
    rotation.input(source + first * bytes, dtype, kHadamardBlock,
                   before ? before + column : nullptr, kHadamardBlock, values);
    if (after != nullptr) {
      for (int i = 0; i < kHadamardBlock; ++i) {
        values[i] *= exl3::cpu::half_to_float(after[column + i]);
      }
    }
    rotation.store(values, kHadamardBlock, target, first, dtype);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def(
      "linear(Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor? bias, "
      "int[] shards, bool exact=False) -> Tensor");
  m.def(
      "moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2, "
      "Tensor experts, Tensor suh13, Tensor svh13, Tensor suh2, Tensor svh2, "
      "int slices, Tensor? expert_map, str activation, float limit, "
      "bool exact=False) -> Tensor");
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
