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

#include "exl3/torch/cuda_workspace.h"

namespace exl3::ops {
namespace {

using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

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

Gpu Device::gpu() const {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    const cudaError_t error = cudaDeviceGetAttribute(&value, which, current_->index);
    STD_TORCH_CHECK(error == cudaSuccess, "exl3: cuda:", current_->index,
                    " does not answer: ", cudaGetErrorString(error));
    return value;
  };
  return {10 * attribute(cudaDevAttrComputeCapabilityMajor) +
              attribute(cudaDevAttrComputeCapabilityMinor),
          attribute(cudaDevAttrMultiProcessorCount)};
}

void* Device::workspace(const char* op, int64_t index, size_t bytes) const {
  return find_workspace(op, current_->index, index, bytes);
}

}  // namespace exl3::ops
