// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The ops' arguments, checked. An op reads its tensors through these functions only, on
// the CPU and on CUDA alike, so that the kernels can rely on what they are given. Each
// message names the op, the argument, what it is and what it should be.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "exl3/codec/trellis.h"
#include "exl3/kernels/params.h"

namespace exl3::ops {

using torch::stable::Tensor;

// One matrix of a slab.
struct StoredMatrix {
  int64_t first_word;  // in the slab
  int64_t k, n;
  int words;
  Codebook codebook;
};

struct StoredShard {
  StoredMatrix matrix;
  int64_t first_column;  // of the shards' columns side by side
  int64_t skip, keep;    // columns [skip, skip + keep) are kept
};

struct LinearCall {
  Tensor x;    // [..., width], contiguous
  Tensor out;  // [..., kept]
  ElementType type;
  int64_t rows, width, k, kept;
  const uint16_t* trellis;
  const uint16_t* suh;  // [shards, k] fp16
  const uint16_t* svh;  // [sum of n] fp16
  const void* bias;     // [kept] of `type`, or null
  std::vector<StoredShard> shards;
};

LinearCall check_linear(const Tensor& x, const Tensor& trellis, const Tensor& suh,
                        const Tensor& svh, const std::optional<Tensor>& bias,
                        const std::vector<int64_t>& shards);

// The router's choice and the table of experts are not looked into: on a GPU that would
// wait for it.
struct MoeCall {
  Tensor x;             // [tokens, width], contiguous
  Tensor topk_ids;      // [tokens, top_k], contiguous
  Tensor topk_weights;  // [tokens, top_k] float32, contiguous
  Tensor out;           // [tokens, width]
  ElementType type;
  bool wide_ids;  // int64, else int32
  int64_t tokens, width, top_k;
  int64_t hidden, intermediate;  // as stored; intermediate of one slice
  int64_t virtual_experts, slices;
  int64_t routed_experts;  // that ids may name
  const uint16_t* w13;
  const uint16_t* w2;
  int64_t w13_words, w2_words;  // sizes of the slabs
  const int64_t* experts;       // [virtual experts, 3, 3]
  const uint16_t* suh13;        // [virtual experts, 2, hidden] fp16
  const uint16_t* svh13;        // [virtual experts, 2, intermediate] fp16
  const uint16_t* suh2;         // [virtual experts, intermediate] fp16
  const uint16_t* svh2;         // [virtual experts, hidden] fp16
  const int32_t* expert_map;    // [routed experts], or null
  float limit;
};

MoeCall check_moe(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                  const Tensor& w13, const Tensor& w2, const Tensor& experts,
                  const Tensor& suh13, const Tensor& svh13, const Tensor& suh2,
                  const Tensor& svh2, int64_t slices,
                  const std::optional<Tensor>& expert_map,
                  const std::string& activation, double limit);

struct DequantCall {
  Tensor out;  // [k, n] float32
  StoredMatrix matrix;
  const uint16_t* trellis;
  const uint16_t* suh;  // [k] fp16, or null
  const uint16_t* svh;  // [n] fp16, or null
};

DequantCall check_dequant(const Tensor& trellis, const std::optional<Tensor>& suh,
                          const std::optional<Tensor>& svh, int64_t k, int64_t n,
                          int64_t words, int64_t codebook);

struct HadamardCall {
  Tensor x;    // [..., width], contiguous
  Tensor out;  // as x
  ElementType type;
  int64_t rows, width;
  const uint16_t* pre;   // [width] fp16, or null
  const uint16_t* post;  // [width] fp16, or null
};

HadamardCall check_hadamard(const Tensor& x, const std::optional<Tensor>& pre,
                            const std::optional<Tensor>& post);

// A matrix [k, n] that begins at a word of a slab of so many words.
StoredMatrix check_matrix(const char* op, int64_t slab_words, int64_t first_word,
                          int64_t k, int64_t n, int64_t words, int64_t codebook);

}  // namespace exl3::ops
