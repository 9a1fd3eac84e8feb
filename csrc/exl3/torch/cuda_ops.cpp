// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The kernels' ops on CUDA, with the schemas of cpu_ops.cpp. Nothing here allocates but
// the result, and nothing waits for the GPU: the ops can be captured in CUDA graphs.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "exl3/launch/dequantize.h"
#include "exl3/launch/linear.h"
#include "exl3/launch/transform.h"
#include "exl3/torch/arguments.h"
#include "exl3/torch/cuda_device.h"

namespace {

using exl3::LinearArguments;
using exl3::LinearPlan;
using exl3::Stream;
using exl3::ops::Tensor;
using torch::stable::accelerator::DeviceGuard;

// More rows are worked on in parts of so many, which keeps the workspace small. A part
// fills the largest GPU several times over.
constexpr int64_t kRowsAtOnce = 2048;

int64_t element_bytes(exl3::ElementType type) {
  return type == exl3::ElementType::kFloat32 ? 4 : 2;
}

std::vector<exl3::Shard> launch_shards(
    const std::vector<exl3::ops::StoredShard>& stored) {
  std::vector<exl3::Shard> shards;
  for (const exl3::ops::StoredShard& shard : stored) {
    shards.push_back({static_cast<int>(shard.matrix.n), static_cast<int>(shard.skip),
                      static_cast<int>(shard.keep), shard.matrix.words,
                      shard.matrix.codebook});
  }
  return shards;
}

Tensor linear(const Tensor& x, const Tensor& trellis, const Tensor& suh,
              const Tensor& svh, const std::optional<Tensor>& bias,
              const std::vector<int64_t>& shards, bool /*exact: always*/,
              bool batch_invariant, int64_t workspace) {
  const exl3::ops::LinearCall call =
      exl3::ops::check_linear(x, trellis, suh, svh, bias, shards);
  const int32_t device = x.get_device_index();
  const DeviceGuard guard(device);
  const Stream stream = exl3::ops::current_stream(device);
  LinearArguments part{};
  part.trellis = call.trellis;
  part.suh = call.suh;
  part.svh = call.svh;
  part.bias = call.bias;
  part.type = call.type;
  part.width = static_cast<int>(call.width);
  part.k = static_cast<int>(call.k);
  part.shards = launch_shards(call.shards);
  const auto* source = static_cast<const char*>(call.x.const_data_ptr());
  auto* target = static_cast<char*>(call.out.mutable_data_ptr());
  for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    part.x = source + row * call.width * element_bytes(call.type);
    part.out = target + row * call.kept * element_bytes(call.type);
    part.rows = static_cast<int>(std::min(kRowsAtOnce, call.rows - row));
    const LinearPlan plan =
        exl3::choose_plan(part, exl3::ops::multiprocessors(device), batch_invariant);
    const size_t bytes = exl3::workspace_bytes(part, plan);
    exl3::linear(part, plan, exl3::ops::workspace("linear", device, workspace, bytes),
                 stream);
  }
  return call.out;
}

// A call of `linear` without its tensors: all that plans depend on.
LinearArguments without_tensors(int64_t rows, int64_t k,
                                const std::vector<int64_t>& shards) {
  LinearArguments call{};
  call.rows = static_cast<int>(rows);
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
                                 int64_t multiprocessors, bool batch_invariant) {
  const LinearPlan plan =
      exl3::choose_plan(without_tensors(std::min(rows, kRowsAtOnce), k, shards),
                        static_cast<int>(multiprocessors), batch_invariant);
  return {plan.block_rows, plan.splits};
}

int64_t linear_workspace(int64_t rows, int64_t k, const std::vector<int64_t>& shards,
                         int64_t multiprocessors) {
  LinearArguments call = without_tensors(0, k, shards);
  size_t most = 0;
  for (call.rows = 1; call.rows <= std::min(rows, kRowsAtOnce); ++call.rows) {
    const LinearPlan plan =
        exl3::choose_plan(call, static_cast<int>(multiprocessors), false);
    most = std::max(most, exl3::workspace_bytes(call, plan));
  }
  return static_cast<int64_t>(most);
}

Tensor dequant(const Tensor& trellis, const std::optional<Tensor>& suh,
               const std::optional<Tensor>& svh, int64_t k, int64_t n, int64_t words,
               int64_t codebook) {
  const exl3::ops::DequantCall call =
      exl3::ops::check_dequant(trellis, suh, svh, k, n, words, codebook);
  const int32_t device = trellis.get_device_index();
  const DeviceGuard guard(device);
  exl3::launch_dequantize(call.matrix.words, call.matrix.codebook,
                          exl3::ops::current_stream(device),
                          {call.trellis, call.suh, call.svh,
                           static_cast<float*>(call.out.mutable_data_ptr()),
                           static_cast<int>(k), static_cast<int>(n)});
  return call.out;
}

Tensor hadamard(const Tensor& x, const std::optional<Tensor>& pre,
                const std::optional<Tensor>& post) {
  const exl3::ops::HadamardCall call = exl3::ops::check_hadamard(x, pre, post);
  const int32_t device = x.get_device_index();
  const DeviceGuard guard(device);
  if (call.rows > 0) {
    exl3::launch_transform(
        exl3::ops::current_stream(device),
        {call.x.const_data_ptr(), call.pre, call.post, call.out.mutable_data_ptr(),
         call.type, call.type, static_cast<int>(call.rows),
         static_cast<int>(call.width), static_cast<int>(call.width), 1});
  }
  return call.out;
}

void set_workspace(const Tensor& workspace, int64_t index) {
  const DeviceGuard guard(workspace.get_device_index());
  exl3::ops::set_workspace(workspace, index);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def("set_workspace(Tensor workspace, int index) -> ()");
  m.def("linear_workspace(int rows, int k, int[] shards, int multiprocessors) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("dequant", TORCH_BOX(&dequant));
  m.impl("hadamard", TORCH_BOX(&hadamard));
  m.impl("set_workspace", TORCH_BOX(&set_workspace));
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("linear_workspace", TORCH_BOX(&linear_workspace));
  m.impl("linear_plan", TORCH_BOX(&linear_plan));
}
