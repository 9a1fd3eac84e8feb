// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// exl3::ops::Device for torch tensors on the CPU: a small GPU, run by the emulator. The
// result, and what an op asks for of its workspace, are checked to the byte; all other
// memory may be read.
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>

#include "emu/device.h"
#include "exl3/launch/linear.h"
#include "exl3/torch/cuda_device.h"
#include "exl3/torch/cuda_workspace.h"

namespace exl3::ops {
namespace {

// Few, so that small tests have work for more than one wave of blocks and for one.
constexpr int kMultiprocessors = 4;
constexpr int32_t kCpu = -1;  // the index of the CPU, as torch has it

size_t bytes_of(const torch::stable::Tensor& tensor) {
  const bool wide = tensor.scalar_type() == torch::headeronly::ScalarType::Float;
  return static_cast<size_t>(tensor.numel()) * (wide ? 4 : 2);
}

}  // namespace

struct Device::Current {
  emu::Device device;
  std::map<int64_t, size_t> workspaces;   // by index: bytes that this op asked for
  std::map<const char*, size_t> written;  // what else than reading is allowed: bytes
  bool complete = false;

  void add(const char* name, char* data, size_t bytes, emu::Access access) {
    device.memory.add(name, data, bytes, access);
    written[data] = bytes;
  }
};

Device::Device(const torch::stable::Tensor& result) : current_(new Current) {
  torch::stable::Tensor out = result;
  current_->add("result", static_cast<char*>(out.mutable_data_ptr()), bytes_of(result),
                emu::Access::kUninitialized);
}

Device::~Device() {
  for (const auto& [index, bytes] : current_->workspaces) {
    const auto* head =
        static_cast<const char*>(find_workspace("check", kCpu, index, bytes));
    for (size_t i = kStatisticsBytes; i < kHeadBytes; ++i) {
      // A destructor must not throw, and a test must not go on.
      if (head[i] != 0) std::abort();
    }
  }
}

Stream Device::stream() const {
  if (current_->complete) return nullptr;
  current_->complete = true;
  // All that lies between what may be written. Addresses have 47 bits.
  uintptr_t begin = 0;
  const auto input = [&](uintptr_t end) {
    current_->device.memory.add("an input", reinterpret_cast<void*>(begin), end - begin,
                                emu::Access::kRead);
  };
  for (const auto& [data, bytes] : current_->written) {
    input(reinterpret_cast<uintptr_t>(data));
    begin = reinterpret_cast<uintptr_t>(data) + bytes;
  }
  input(uintptr_t{1} << 47);
  return nullptr;
}

Gpu Device::gpu() const { return {90, kMultiprocessors}; }

void* Device::workspace(const char* op, int64_t index, size_t bytes) const {
  auto* data = static_cast<char*>(find_workspace(op, kCpu, index, bytes));
  const auto [found, is_new] = current_->workspaces.emplace(index, bytes);
  if (is_new) {
    current_->add("head", data, kHeadBytes, emu::Access::kReadWrite);
    current_->add("workspace", data + kHeadBytes, bytes - kHeadBytes,
                  emu::Access::kUninitialized);
  } else if (found->second < bytes) {
    throw std::runtime_error("a later part of an op needs more than the first");
  }
  return data;
}

}  // namespace exl3::ops
