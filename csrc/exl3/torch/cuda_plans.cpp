// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Plans of `linear`, and the workspace that they need: computed, without a GPU.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "exl3/launch/linear.h"
#include "exl3/torch/cuda_device.h"

namespace {

using exl3::Gpu;
using exl3::LinearArguments;
using exl3::LinearPlan;
using exl3::ops::kRowsAtOnce;

Gpu gpu_of(int64_t architecture, int64_t multiprocessors) {
  return {static_cast<int>(architecture), static_cast<int>(multiprocessors)};
}

// A call of `linear` without its tensors: all that plans depend on.
LinearArguments without_tensors(int64_t rows, int64_t k,
                                const std::vector<int64_t>& shards) {
  LinearArguments call{};
  call.rows = static_cast<int>(std::min(rows, kRowsAtOnce));
  call.k = static_cast<int>(k);
  for (size_t i = 0; i + 4 < shards.size(); i += 5) {
    call.shards.push_back({static_cast<int>(shards[i]), static_cast<int>(shards[i + 1]),
                           static_cast<int>(shards[i + 2]),
                           static_cast<int>(shards[i + 3]),
                           static_cast<exl3::Codebook>(shards[i + 4])});
  }
  return call;
}

std::vector<int64_t> linear_plan(int64_t rows, int64_t k,
                                 const std::vector<int64_t>& shards,
                                 int64_t architecture, int64_t multiprocessors,
                                 bool exact, bool batch_invariant) {
  const LinearPlan plan =
      exl3::choose_plan(without_tensors(rows, k, shards),
                        gpu_of(architecture, multiprocessors), exact, batch_invariant);
  return {plan.block_rows, plan.splits, plan.unrounded};
}

int64_t linear_workspace(int64_t rows, int64_t k, const std::vector<int64_t>& shards,
                         int64_t architecture, int64_t multiprocessors) {
  const Gpu gpu = gpu_of(architecture, multiprocessors);
  LinearArguments call = without_tensors(rows, k, shards);
  const int most_rows = call.rows;
  size_t most = 0;
  for (call.rows = 1; call.rows <= most_rows; ++call.rows) {
    for (const bool batch_invariant : {false, true}) {
      // Exact weights need no more than others.
      const LinearPlan plan = exl3::choose_plan(call, gpu, false, batch_invariant);
      most = std::max(most, exl3::workspace_bytes(call, plan));
    }
  }
  return static_cast<int64_t>(most);
}

// Eight numbers a plan; exl3/plans.py has checked them.
void set_linear_plans(const std::vector<int64_t>& numbers) {
  STD_TORCH_CHECK(numbers.size() % 8 == 0, "exl3::set_linear_plans: ", numbers.size(),
                  " numbers; pass eight for each plan");
  std::vector<exl3::MeasuredPlan> plans;
  for (size_t i = 0; i < numbers.size(); i += 8) {
    const int64_t* plan = numbers.data() + i;
    plans.push_back(
        {static_cast<int>(plan[0]),
         plan[1],
         plan[2],
         plan[3],
         plan[4],
         {static_cast<int>(plan[5]), static_cast<int>(plan[6]), plan[7] != 0}});
  }
  exl3::set_measured_plans(std::move(plans));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def(
      "linear_workspace(int rows, int k, int[] shards, int architecture, "
      "int multiprocessors) -> int");
  m.def(
      "linear_plan(int rows, int k, int[] shards, int architecture, "
      "int multiprocessors, bool exact, bool batch_invariant) -> int[]");
  m.def("set_linear_plans(int[] numbers) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("linear_workspace", TORCH_BOX(&linear_workspace));
  m.impl("linear_plan", TORCH_BOX(&linear_plan));
  m.impl("set_linear_plans", TORCH_BOX(&set_linear_plans));
}
