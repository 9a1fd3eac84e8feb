// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// exl3::ops::Device for torch tensors on the CPU: a small GPU, run by the emulator. The
// result and the workspace are checked to the byte; all other memory may be read.
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "emu/device.h"
#include "exl3/launch/linear.h"
#include "exl3/torch/cuda_device.h"

namespace exl3::ops {
namespace {

// Few, so that small tests have work for more than one wave of blocks and for one.
constexpr int kMultiprocessors = 4;
constexpr size_t kAlignment = 256;

// A workspace of exactly the bytes that were asked for, full of what nobody may read.
struct Memory {
  explicit Memory(size_t bytes)
      : bytes(bytes), storage(bytes + kAlignment, static_cast<char>(0xff)) {
    void* start = storage.data();
    size_t space = storage.size();
    data = static_cast<char*>(std::align(kAlignment, bytes, start, space));
    std::memset(data, 0, kHeadBytes);
  }
  size_t bytes;
  std::vector<char> storage;
  char* data;
};

size_t bytes_of(const torch::stable::Tensor& tensor) {
  const bool wide = tensor.scalar_type() == torch::headeronly::ScalarType::Float;
  return static_cast<size_t>(tensor.numel()) * (wide ? 4 : 2);
}

}  // namespace

struct Device::Current {
  emu::Device device;
  std::map<int64_t, Memory> workspaces;   // by index; of this op alone
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
  for (const auto& [index, memory] : current_->workspaces) {
    for (size_t i = kStatisticsBytes; i < kHeadBytes; ++i) {
      // A destructor must not throw, and a test must not go on.
      if (memory.data[i] != 0) std::abort();
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

void* Device::workspace(const char*, int64_t index, size_t bytes) const {
  auto& all = current_->workspaces;
  const auto found = all.find(index);
  if (found != all.end() && found->second.bytes >= bytes) return found->second.data;
  if (found != all.end()) {
    throw std::runtime_error("a later part of an op needs more than the first");
  }
  Memory& memory = all.try_emplace(index, bytes).first->second;
  current_->add("head", memory.data, kHeadBytes, emu::Access::kReadWrite);
  current_->add("workspace", memory.data + kHeadBytes, bytes - kHeadBytes,
                emu::Access::kUninitialized);
  return memory.data;
}

}  // namespace exl3::ops
