// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

// The header declares torch's CUDA functions only if asked to; their addresses are
// looked up below.
#define USE_CUDA
#include "exl3/torch/cuda_device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <map>
#include <mutex>
#include <utility>

#include "exl3/launch/linear.h"

namespace exl3::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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

Stream current_stream(int32_t device) {
  static const GetStream get_stream = find_get_stream();
  Stream stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(get_stream(device, &stream));
  return stream;
}

int multiprocessors(int32_t device) {
  int count = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  STD_TORCH_CHECK(error == cudaSuccess, "exl3: cuda:", device,
                  " does not answer: ", cudaGetErrorString(error));
  return count;
}

void set_workspace(const Tensor& workspace, int64_t index) {
  check_index("set_workspace", index);
  STD_TORCH_CHECK(workspace.scalar_type() == ScalarType::Byte && workspace.dim() == 1 &&
                      workspace.is_contiguous(),
                  "exl3::set_workspace: pass a contiguous uint8 tensor [bytes]");
  STD_TORCH_CHECK(workspace.numel() >= static_cast<int64_t>(kCounterBytes),
                  "exl3::set_workspace: ", workspace.numel(), " bytes; at least ",
                  kCounterBytes, " are needed");
  // The kernels leave the counters as they found them.
  Tensor counters = torch::stable::narrow(const_cast<Tensor&>(workspace), 0, 0,
                                          static_cast<int64_t>(kCounterBytes));
  torch::stable::zero_(counters);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.workspaces.insert_or_assign({workspace.get_device_index(), index}, workspace);
}

void* workspace(const char* op, int32_t device, int64_t index, size_t bytes) {
  check_index(op, index);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.workspaces.find({device, index});
  const int64_t given = found == all.workspaces.end() ? 0 : found->second.numel();
  STD_TORCH_CHECK(static_cast<int64_t>(bytes) <= given, "exl3::", op, ": workspace ",
                  index, " of cuda:", device, " has ", given, " bytes; ", bytes,
                  " are needed: ask exl3.workspace for them before the first call");
  return found->second.mutable_data_ptr();
}

}  // namespace exl3::ops
