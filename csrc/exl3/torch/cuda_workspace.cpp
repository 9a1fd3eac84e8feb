// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#include "exl3/torch/cuda_workspace.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "exl3/launch/moe.h"
#include "exl3/launch/workspace.h"
#include "exl3/torch/cuda_device.h"

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr size_t kWorkspaceAlignment = 16;  // of the kernels' widest accesses

struct Registry {
  std::mutex mutex;
  std::map<std::pair<int32_t, int64_t>, Tensor> workspaces;  // by device and index
};

// Never destroyed: when the process ends, torch may be gone before.
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

void check_index(const char* op, int64_t index) {
  STD_TORCH_CHECK(index >= 0 && index < kWorkspaces, "exl3::", op, ": workspace is ",
                  index, "; there are 0 to ", kWorkspaces - 1);
}

void set_workspace(const Tensor& workspace, int64_t index) {
  check_index("set_workspace", index);
  STD_TORCH_CHECK(
      workspace.scalar_type() == ScalarType::Byte && workspace.dim() == 1 &&
          workspace.is_contiguous() &&
          reinterpret_cast<uintptr_t>(workspace.const_data_ptr()) %
                  kWorkspaceAlignment ==
              0,
      "exl3::set_workspace: pass a contiguous uint8 tensor [bytes] that begins at a "
      "multiple of ",
      kWorkspaceAlignment, " bytes");
  STD_TORCH_CHECK(workspace.numel() >= static_cast<int64_t>(kHeadBytes),
                  "exl3::set_workspace: ", workspace.numel(), " bytes; at least ",
                  kHeadBytes, " are needed");
  Tensor whole = workspace;
  Tensor head = torch::stable::narrow(whole, 0, 0, static_cast<int64_t>(kHeadBytes));
  torch::stable::zero_(head);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.workspaces.insert_or_assign({workspace.get_device_index(), index}, workspace);
}

int64_t moe_workspace(int64_t tokens, int64_t top_k, int64_t hidden,
                      int64_t intermediate, int64_t virtual_experts, int64_t slices,
                      int64_t multiprocessors) {
  MoeParams call{};
  call.top_k = static_cast<int>(top_k);
  call.hidden = static_cast<int>(hidden);
  call.intermediate = static_cast<int>(intermediate);
  call.local_experts = static_cast<int>(virtual_experts / slices);
  call.slices = static_cast<int>(slices);
  size_t most = 0;
  for (call.tokens = 1; call.tokens <= std::min(tokens, kTokensAtOnce); ++call.tokens) {
    for (const bool batch_invariant : {false, true}) {
      const MoePlan plan =
          choose_moe_plan(call, static_cast<int>(multiprocessors), batch_invariant);
      most = std::max(most, moe_workspace_bytes(call, plan));
    }
  }
  return static_cast<int64_t>(most);
}

}  // namespace

void* find_workspace(const char* op, int32_t device, int64_t index, size_t bytes) {
  check_index(op, index);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.workspaces.find({device, index});
  const int64_t given = found == all.workspaces.end() ? 0 : found->second.numel();
  STD_TORCH_CHECK(static_cast<int64_t>(bytes) <= given, "exl3::", op, ": workspace ",
                  index, " of cuda:", device, " has ", given, " bytes; ", bytes,
                  " are needed: reserve them by exl3.workspace, when loading");
  return found->second.mutable_data_ptr();
}

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def("set_workspace(Tensor workspace, int index) -> ()");
  m.def(
      "moe_workspace(int tokens, int top_k, int hidden, int intermediate, "
      "int virtual_experts, int slices, int multiprocessors) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, EXL3_OPS_DEVICE, m) {
  m.impl("set_workspace", TORCH_BOX(&set_workspace));
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("moe_workspace", TORCH_BOX(&moe_workspace));
}

}  // namespace exl3::ops
