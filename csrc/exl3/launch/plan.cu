// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#include <mutex>
#include <utility>

#include "exl3/launch/plan.h"

namespace exl3 {
namespace {

struct Table {
  std::mutex mutex;
  std::vector<MeasuredPlan> plans;
};

Table& table() {
  static Table instance;
  return instance;
}

}  // namespace

void set_measured_plans(std::vector<MeasuredPlan> plans) {
  const std::lock_guard<std::mutex> lock(table().mutex);
  table().plans = std::move(plans);
}

std::optional<LinearPlan> measured_plan(int architecture, int64_t rows, int64_t k,
                                        int64_t n) {
  const std::lock_guard<std::mutex> lock(table().mutex);
  for (const MeasuredPlan& measured : table().plans) {
    if (measured.architecture == architecture && measured.k == k && measured.n == n &&
        measured.first_rows <= rows && rows <= measured.last_rows) {
      return measured.plan;
    }
  }
  return std::nullopt;
}

}  // namespace exl3
