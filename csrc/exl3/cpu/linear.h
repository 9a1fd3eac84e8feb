// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The linear layer: y = ((x * suh) H W H) * svh + bias, for several shards at once.
#pragma once

#include <cstdint>
#include <vector>

#include "exl3/cpu/kernel.h"
#include "exl3/cpu/numbers.h"
#include "exl3/cpu/parallel.h"

namespace exl3::cpu {

// One stored matrix, of which columns [skip, skip + keep) are wanted.
struct Shard {
  Trellis w;
  const uint16_t* suh;  // [k] fp16
  const uint16_t* svh;  // [stored n] fp16
  int64_t skip;
  int64_t keep;
};

struct Linear {
  const void* x;     // [rows, width]
  const void* bias;  // [sum of keep] or null
  void* out;         // [rows, sum of keep]
  DType dtype;       // of x, bias and out
  int64_t rows;
  int64_t width;  // at most the shards' k
  std::vector<Shard> shards;
  bool exact;
  Isa isa;
};

void linear(const Linear& layer, const ParallelFor& parallel);

}  // namespace exl3::cpu
