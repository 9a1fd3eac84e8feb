// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// One linear op on a device: input transform, then one product for each kind of tile.
#pragma once

#include <cstddef>
#include <vector>

#include "exl3/launch/gemm.h"
#include "exl3/launch/workspace.h"

namespace exl3 {

// One matrix of a fused group, as the op `linear` describes it.
struct Shard {
  int n;           // stored columns, a multiple of 128
  int skip, keep;  // columns [skip, skip + keep) are kept
  int words;
  Codebook codebook;
};

struct LinearArguments {
  const void* x;  // [rows, width] of `type`
  const uint16_t*
      trellis;          // strip-major matrices [n/16, k/16, words], one after another
  const uint16_t* suh;  // [shards, k] fp16
  const uint16_t* svh;  // [sum of n] fp16
  const void* bias;     // [sum of keep] of `type`, or null
  void* out;            // [rows, sum of keep] of `type`
  ElementType type;
  int rows, width, k;
  std::vector<Shard> shards;
};

// The plan for so many rows: the measured one, or by rule. `exact`: weights have
// exactly the format's values. `batch_invariant`: a row's result doesn't depend on how
// many rows there are.
LinearPlan choose_plan(const LinearArguments& arguments, const Gpu& gpu, bool exact,
                       bool batch_invariant);

// Bytes of workspace that the plan needs (workspace.h).
size_t workspace_bytes(const LinearArguments& arguments, const LinearPlan& plan);

void linear(const LinearArguments& arguments, const LinearPlan& plan, void* workspace,
            Stream stream);

}  // namespace exl3
