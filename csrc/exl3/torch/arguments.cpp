// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/torch/arguments.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;

std::string list_of(const std::vector<int64_t>& sizes) {
  std::string text;
  for (const int64_t size : sizes) {
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  }
  return "[" + text + "]";
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  return {tensor.sizes().begin(), tensor.sizes().end()};
}

ElementType element_type(const char* op, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return ElementType::kFloat32;
    case ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case ScalarType::Half:
      return ElementType::kFloat16;
    default:
      STD_TORCH_CHECK(false, "exl3::", op, ": x is ",
                      torch::headeronly::toString(x.scalar_type()),
                      "; pass float32, bfloat16 or float16");
  }
}

void check_blocks(const char* op, const char* name, int64_t size) {
  STD_TORCH_CHECK(size > 0 && size % kHadamardBlock == 0, "exl3::", op, ": ", name,
                  " is ", size, "; EXL3 stores multiples of ", kHadamardBlock);
}

// Gives out the memory of tensors that are what the op expects.
class Checker {
 public:
  // Everything must lie where `first` does.
  Checker(const char* op, const char* first_name, const Tensor& first)
      : op_(op), first_name_(first_name), first_(first) {}

  const void* any(const char* name, const Tensor& tensor, ScalarType dtype,
                  const std::vector<int64_t>& shape) const {
    STD_TORCH_CHECK(shape_of(tensor) == shape, "exl3::", op_, ": ", name, " has shape ",
                    list_of(shape_of(tensor)), "; expected ", list_of(shape));
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, "exl3::", op_, ": ", name, " is ",
                    torch::headeronly::toString(tensor.scalar_type()), "; expected ",
                    torch::headeronly::toString(dtype));
    STD_TORCH_CHECK(tensor.is_contiguous(), "exl3::", op_, ": ", name,
                    " is not contiguous; call .contiguous() once, when loading");
    STD_TORCH_CHECK(tensor.is_cpu() == first_.is_cpu() &&
                        tensor.get_device_index() == first_.get_device_index(),
                    "exl3::", op_, ": ", name, " and ", first_name_,
                    " are on different devices");
    const void* data = tensor.const_data_ptr();
    // GPUs read 16 bytes at once.
    STD_TORCH_CHECK(tensor.is_cpu() || reinterpret_cast<uintptr_t>(data) % 16 == 0,
                    "exl3::", op_, ": ", name, " does not begin at a multiple of 16 ",
                    "bytes; call .clone() once, when loading");
    return data;
  }

  const uint16_t* halves(const char* name, const Tensor& tensor,
                         const std::vector<int64_t>& shape) const {
    return static_cast<const uint16_t*>(any(name, tensor, ScalarType::Half, shape));
  }

  const uint16_t* halves(const char* name, const std::optional<Tensor>& tensor,
                         const std::vector<int64_t>& shape) const {
    return tensor ? halves(name, *tensor, shape) : nullptr;
  }

  const uint16_t* slab(const char* name, const Tensor& tensor) const {
    return static_cast<const uint16_t*>(
        any(name, tensor, ScalarType::Short, {tensor.numel()}));
  }

 private:
  const char* op_;
  const char* first_name_;
  const Tensor& first_;
};

// Activations may come as any view: what the kernels cannot read is copied.
Tensor readable(const Tensor& x) {
  Tensor y = torch::stable::contiguous(x);
  const bool aligned = reinterpret_cast<uintptr_t>(y.const_data_ptr()) % 16 == 0;
  return y.is_cpu() || aligned ? y : torch::stable::clone(y);
}

}  // namespace

StoredMatrix check_matrix(const char* op, int64_t slab_words, int64_t first_word,
                          int64_t k, int64_t n, int64_t words, int64_t codebook) {
  STD_TORCH_CHECK(legal_words(words, codebook), "exl3::", op, ": ", words,
                  " words a tile with codebook ", codebook,
                  " do not exist; see exl3/codec/trellis.h for those that do");
  const int64_t size = (k / kTileSide) * (n / kTileSide) * words;
  STD_TORCH_CHECK(first_word >= 0 && first_word <= slab_words - size, "exl3::", op,
                  ": a matrix [", k, ", ", n, "] of ", words, " words a tile needs ",
                  size, " words from offset ", first_word, "; the slab has ",
                  slab_words);
  return {first_word, k, n, static_cast<int>(words), static_cast<Codebook>(codebook)};
}

LinearCall check_linear(const Tensor& x, const Tensor& trellis, const Tensor& suh,
                        const Tensor& svh, const std::optional<Tensor>& bias,
                        const std::vector<int64_t>& shards) {
  constexpr const char* kOp = "linear";
  constexpr size_t kFields = 5;
  const ElementType type = element_type(kOp, x);
  STD_TORCH_CHECK(x.dim() >= 1, "exl3::linear: x has no dimensions");
  STD_TORCH_CHECK(!shards.empty() && shards.size() % kFields == 0,
                  "exl3::linear: shards has ", shards.size(),
                  " numbers; pass n, skip, keep, words, codebook for each shard");
  const auto num_shards = static_cast<int64_t>(shards.size() / kFields);
  STD_TORCH_CHECK(suh.dim() == 2, "exl3::linear: suh has shape ",
                  list_of(shape_of(suh)), "; expected [shards, stored k]");
  const int64_t k = suh.size(1);
  const int64_t width = x.size(x.dim() - 1);
  check_blocks(kOp, "stored k", k);
  STD_TORCH_CHECK(width <= k, "exl3::linear: x has ", width,
                  " features; the weights store ", k);

  std::vector<StoredShard> stored;
  int64_t first_word = 0;
  int64_t columns = 0;
  int64_t kept = 0;
  for (int64_t i = 0; i < num_shards; ++i) {
    const int64_t* field = shards.data() + i * kFields;
    const int64_t n = field[0], skip = field[1], keep = field[2];
    check_blocks(kOp, "a shard's stored n", n);
    STD_TORCH_CHECK(skip >= 0 && keep >= 0 && skip <= n && keep <= n - skip,
                    "exl3::linear: shard ", i, " keeps columns ", skip, " to ",
                    skip + keep, " of ", n);
    const StoredMatrix matrix =
        check_matrix(kOp, trellis.numel(), first_word, k, n, field[3], field[4]);
    stored.push_back({matrix, columns, skip, keep});
    first_word += (k / kTileSide) * (n / kTileSide) * matrix.words;
    columns += n;
    kept += keep;
  }
  STD_TORCH_CHECK(first_word == trellis.numel(), "exl3::linear: trellis has ",
                  trellis.numel(), " words; its shards have ", first_word);

  const Checker check(kOp, "x", x);
  const Tensor readable_x = readable(x);
  std::vector<int64_t> shape = shape_of(x);
  shape.back() = kept;
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  return {
      readable_x,
      torch::stable::new_empty(readable_x, shape),
      type,
      rows,
      width,
      k,
      kept,
      check.slab("trellis", trellis),
      check.halves("suh", suh, {num_shards, k}),
      check.halves("svh", svh, {columns}),
      bias ? check.any("bias", *bias, x.scalar_type(), {kept}) : nullptr,
      std::move(stored),
  };
}

MoeCall check_moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                  const Tensor& w13, const Tensor& w2, const Tensor& experts,
                  const Tensor& suh13, const Tensor& svh13, const Tensor& suh2,
                  const Tensor& svh2, int64_t slices,
                  const std::optional<Tensor>& expert_map,
                  const std::string& activation, double limit) {
  constexpr const char* kOp = "moe";
  const ElementType type = element_type(kOp, x);
  STD_TORCH_CHECK(x.dim() == 2, "exl3::moe: x has shape ", list_of(shape_of(x)),
                  "; expected [tokens, hidden]");
  STD_TORCH_CHECK(activation == "silu", "exl3::moe: activation is '", activation,
                  "'; only 'silu' is implemented");
  STD_TORCH_CHECK(limit > 0, "exl3::moe: limit is ", limit,
                  "; pass a positive number, or infinity for none");
  STD_TORCH_CHECK(suh13.dim() == 3 && suh2.dim() == 2, "exl3::moe: suh13 has shape ",
                  list_of(shape_of(suh13)), " and suh2 ", list_of(shape_of(suh2)),
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
  const int64_t tokens = x.size(0);
  STD_TORCH_CHECK(x.size(1) <= hidden, "exl3::moe: x has ", x.size(1),
                  " features; the experts store ", hidden);
  STD_TORCH_CHECK(topk_ids.dim() == 2 && topk_ids.size(0) == tokens,
                  "exl3::moe: topk_ids has shape ", list_of(shape_of(topk_ids)),
                  " for ", tokens, " tokens; expected [tokens, top_k]");
  const int64_t top_k = topk_ids.size(1);
  const bool wide = topk_ids.scalar_type() == ScalarType::Long;

  const Checker check(kOp, "x", x);
  MoeCall call{readable(x), readable(topk_ids), readable(topk_weights),
               torch::stable::new_empty(x, shape_of(x)), type, wide, tokens, x.size(1),
               top_k, hidden, intermediate, count, slices,
               // Without a map every routed expert is local.
               expert_map ? expert_map->numel() : count / slices,
               check.slab("w13", w13), check.slab("w2", w2), w13.numel(), w2.numel(),
               static_cast<const int64_t*>(
                   check.any("experts", experts, ScalarType::Long, {count, 3, 3})),
               check.halves("suh13", suh13, {count, 2, hidden}),
               check.halves("svh13", svh13, {count, 2, intermediate}),
               check.halves("suh2", suh2, {count, intermediate}),
               check.halves("svh2", svh2, {count, hidden}), nullptr,
               static_cast<float>(limit)};
  check.any("topk_ids", call.topk_ids, wide ? ScalarType::Long : ScalarType::Int,
            {tokens, top_k});
  check.any("topk_weights", call.topk_weights, ScalarType::Float, {tokens, top_k});
  if (expert_map) {
    call.expert_map = static_cast<const int32_t*>(
        check.any("expert_map", *expert_map, ScalarType::Int, {call.routed_experts}));
  }
  return call;
}

DequantCall check_dequant(const Tensor& trellis, const std::optional<Tensor>& suh,
                          const std::optional<Tensor>& svh, int64_t k, int64_t n,
                          int64_t words, int64_t codebook) {
  constexpr const char* kOp = "dequant";
  check_blocks(kOp, "k", k);
  check_blocks(kOp, "n", n);
  const StoredMatrix matrix =
      check_matrix(kOp, trellis.numel(), 0, k, n, words, codebook);
  const int64_t size = (k / kTileSide) * (n / kTileSide) * words;
  STD_TORCH_CHECK(size == trellis.numel(), "exl3::dequant: trellis has ",
                  trellis.numel(), " words; a matrix [", k, ", ", n, "] of ", words,
                  " words a tile has ", size);
  const Checker check(kOp, "trellis", trellis);
  return {
      torch::stable::new_empty(trellis, {k, n}, ScalarType::Float),
      matrix,
      check.slab("trellis", trellis),
      check.halves("suh", suh, {k}),
      check.halves("svh", svh, {n}),
  };
}

HadamardCall check_hadamard(const Tensor& x, const std::optional<Tensor>& pre,
                            const std::optional<Tensor>& post) {
  constexpr const char* kOp = "hadamard";
  const ElementType type = element_type(kOp, x);
  STD_TORCH_CHECK(x.dim() >= 1, "exl3::hadamard: x has no dimensions");
  const int64_t width = x.size(x.dim() - 1);
  check_blocks(kOp, "x's last dimension", width);
  const Checker check(kOp, "x", x);
  const Tensor readable_x = readable(x);
  return {readable_x,
          torch::stable::new_empty(readable_x, shape_of(x)),
          type,
          x.numel() / width,
          width,
          check.halves("pre", pre, {width}),
          check.halves("post", post, {width})};
}

}  // namespace exl3::ops
