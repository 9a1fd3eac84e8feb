// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

// The header declares torch's CUDA functions only if asked to; their addresses are
// looked up below.
#define USE_CUDA
#include "exl3/torch/cuda_device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <map>
#include <mutex>
#include <utility>

#include "exl3/launch/linear.h"
#include "exl3/launch/moe.h"

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

// All ops find their counters at the workspace's start.
static_assert(kCounterBytes == kMoeCounterBytes);
constexpr size_t kWorkspaceAlignment = 256;

// torch's current stream is in libtorch_cuda, which a CPU build of torch lacks. So it
// is looked up and not linked, and this library loads beside either.
using GetStream = decltype(&aoti_torch_get_current_cuda_stream);

GetStream find_get_stream() {
  // Torch has loaded it, or there is none.
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* function = library == nullptr
                       ? nullptr
                       : dlsym(library, "aoti_torch_get_current_cuda_stream");
  STD_TORCH_CHECK(function != nullptr,
                  "exl3: this build of torch has no CUDA; install one that has");
  return reinterpret_cast<GetStream>(function);
}

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

}  // namespace

struct Device::Current {
  int32_t index;
  DeviceGuard guard;
};

Device::Device(const Tensor& result)
    : current_(new Current{result.get_device_index(),
                           DeviceGuard(result.get_device_index())}) {}

Device::~Device() = default;

Stream Device::stream() const {
  static const GetStream get_stream = find_get_stream();
  Stream stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(get_stream(current_->index, &stream));
  return stream;
}

int Device::multiprocessors() const {
  int count = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, current_->index);
  STD_TORCH_CHECK(error == cudaSuccess, "exl3: cuda:", current_->index,
                  " does not answer: ", cudaGetErrorString(error));
  return count;
}

void* Device::workspace(const char* op, int64_t index, size_t bytes) const {
  check_index(op, index);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.workspaces.find({current_->index, index});
  const int64_t given = found == all.workspaces.end() ? 0 : found->second.numel();
  STD_TORCH_CHECK(static_cast<int64_t>(bytes) <= given, "exl3::", op, ": workspace ",
                  index, " of cuda:", current_->index, " has ", given, " bytes; ",
                  bytes, " are needed: reserve them by exl3.workspace, when loading");
  return found->second.mutable_data_ptr();
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
  STD_TORCH_CHECK(workspace.numel() >= static_cast<int64_t>(kCounterBytes),
                  "exl3::set_workspace: ", workspace.numel(), " bytes; at least ",
                  kCounterBytes, " are needed");
  // The kernels leave the counters as they found them.
  Tensor whole = workspace;
  Tensor counters =
      torch::stable::narrow(whole, 0, 0, static_cast<int64_t>(kCounterBytes));
  torch::stable::zero_(counters);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.workspaces.insert_or_assign({workspace.get_device_index(), index}, workspace);
}

}  // namespace exl3::ops
