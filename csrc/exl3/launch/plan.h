// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// How a linear op's work is cut into blocks: by rule, or as a table says that was
// measured on a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace exl3 {

struct LinearPlan {
  int block_rows;  // 16, 32, 48, 64 or 128
  int splits;      // of k
  // The tensor core adds a weight's two halves (3inst, mcg) or four bytes (mul1), and
  // nobody rounds the sum. Then block_rows is kUnroundedRows.
  bool unrounded;
};

constexpr int kUnroundedRows = 16;

constexpr int kMaxSplits = 8;

// What plans depend on beside the call.
struct Gpu {
  int architecture;  // 90 for 9.0
  int multiprocessors;
};

// The plan of calls with first_rows to last_rows rows, of k in-features and n stored
// out-features of all shards, on GPUs of this architecture.
struct MeasuredPlan {
  int architecture;
  int64_t k, n;
  int64_t first_rows, last_rows;
  LinearPlan plan;
};

// The table that is asked from now on, in place of the one before. What was reserved
// and captured under that one is not changed: so it comes first.
void set_measured_plans(std::vector<MeasuredPlan> plans);

std::optional<LinearPlan> measured_plan(int architecture, int64_t rows, int64_t k,
                                        int64_t n);

}  // namespace exl3
