// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The workspace that the launchers lay out for one number of rows.
#include <cstdint>

#include "exl3/launch/linear.h"
#include "exl3/launch/moe.h"

extern "C" {

int64_t linear_bytes(int rows, int k, int shards, int columns, int multiprocessors) {
  exl3::LinearArguments call{};
  call.rows = rows;
  call.k = k;
  for (int i = 0; i < shards; ++i) {
    call.shards.push_back({columns, 0, columns, 48, exl3::Codebook::kMcg});
  }
  const auto plan = exl3::choose_plan(call, {90, multiprocessors}, false, false);
  return static_cast<int64_t>(exl3::workspace_bytes(call, plan));
}

int64_t moe_bytes(int tokens, int top_k, int hidden, int intermediate, int experts,
                  int slices, int multiprocessors) {
  exl3::MoeParams call{};
  call.tokens = tokens;
  call.top_k = top_k;
  call.hidden = hidden;
  call.intermediate = intermediate;
  call.local_experts = experts;
  call.slices = slices;
  const auto plan = exl3::choose_moe_plan(call, multiprocessors, false);
  return static_cast<int64_t>(exl3::moe_workspace_bytes(call, plan));
}

}  // extern "C"
