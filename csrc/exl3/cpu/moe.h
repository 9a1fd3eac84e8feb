// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Routed experts: gate and up, silu, down, weighted and summed. Experts may differ in
// bits and codebook, each projection on its own; nothing is padded.
#pragma once

#include <cstdint>
#include <vector>

#include "exl3/cpu/kernel.h"
#include "exl3/cpu/numbers.h"
#include "exl3/cpu/parallel.h"

namespace exl3::cpu {

// Slice j of a local expert e is the virtual expert e * slices + j: a narrower expert
// that always runs with e's tokens and e's weights.
struct VirtualExpert {
  Trellis gate;           // [hidden, intermediate]
  Trellis up;             // [hidden, intermediate]
  Trellis down;           // [intermediate, hidden]
  const uint16_t* suh13;  // [2, hidden] fp16, of gate and up
  const uint16_t* svh13;  // [2, intermediate] fp16
  const uint16_t* suh2;   // [intermediate] fp16
  const uint16_t* svh2;   // [hidden] fp16
};

// One token's place with one local expert.
struct Route {
  int64_t token;
  float weight;
};

struct Moe {
  const void* x;  // [tokens, width]
  void* out;      // [tokens, width]
  DType dtype;    // of x and out
  int64_t tokens;
  int64_t width;         // at most hidden
  int64_t hidden;        // as stored
  int64_t intermediate;  // of one slice
  int64_t slices;
  std::vector<VirtualExpert> experts;      // [local experts * slices]
  std::vector<std::vector<Route>> routes;  // [local experts], in order of token
  float limit;  // silu(min(gate, limit)) * clamp(up, -limit, limit)
  bool exact;
  Isa isa;
};

// A token's sum runs in order of virtual experts, whatever else is in the batch.
void moe(const Moe& layer, const ParallelFor& parallel);

}  // namespace exl3::cpu
