// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What the routed experts' kernels are told. See params.h.
//
// A pair is a token and one of its top_k experts. Pairs whose expert is here are sorted
// by expert; a pair's place in that order is its row. Rows of one expert are cut into
// tiles of at most block_rows. An expert has `slices` virtual experts, which all take
// part in its rows and are added up.
#pragma once

#include "exl3/kernels/params.h"

namespace exl3 {

struct alignas(16) MoeTile {
  int expert;  // local
  int first_row, rows;
  int unused;
};

struct MoeTotals {
  int tiles, rows;
};

struct MoeParams {
  const void* x;              // [tokens, width] of `type`
  const void* topk_ids;       // [tokens, top_k] int64 if wide_ids, else int32
  const float* topk_weights;  // [tokens, top_k]
  const int32_t* expert_map;  // [routed_experts] local expert or -1; or null
  const uint16_t* w13;        // gate and up matrices, strip-major
  const uint16_t* w2;         // down matrices
  const int64_t* experts;     // [virtual experts, 3, 3]: word offset, words, codebook
  const uint16_t* suh13;      // [virtual experts, 2, hidden] fp16
  const uint16_t* svh13;      // [virtual experts, 2, intermediate] fp16
  const uint16_t* suh2;       // [virtual experts, intermediate] fp16
  const uint16_t* svh2;       // [virtual experts, hidden] fp16
  void* out;                  // [tokens, width] of `type`

  ElementType type;
  bool wide_ids;
  int tokens, width, top_k;
  int hidden, intermediate;  // as stored, of one slice
  int local_experts, slices;
  int routed_experts;  // that ids may name
  float limit;         // of the activation; infinite: none
  int block_rows, max_tiles;

  // Workspace. Only these have a value before and after: a number of values beyond
  // fp16, and zeros.
  unsigned long long* clamped;
  unsigned* counters;
  int* counts;          // [local_experts] rows of each
  MoeTotals* totals;    // [1]
  MoeTile* tiles;       // [max_tiles]
  int* row_pair;        // [pairs]
  int* row_expert;      // [pairs] local
  int* pair_row;        // [pairs], or -1: its expert is not here
  uint16_t* rotated;    // [slices, 2, pairs, hidden] fp16
  uint16_t* activated;  // [slices, pairs, intermediate] fp16
  float* products;      // [slices, pairs, hidden]
  float* parts;         // of split sums

  EXL3_HD int pairs() const { return tokens * top_k; }
};

}  // namespace exl3
