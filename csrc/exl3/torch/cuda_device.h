// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What the ops need of a GPU: its current stream, its size, and memory to work in.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "exl3/launch/plan.h"
#include "exl3/launch/stream.h"

// Whose tensors the ops take. The emulator's build names another device: the CPU.
#if !defined(EXL3_OPS_DEVICE)
#define EXL3_OPS_DEVICE CUDA
#endif

namespace exl3::ops {

// The GPU of one op's result; the current one as long as this lives.
class Device {
 public:
  explicit Device(const torch::stable::Tensor& result);
  ~Device();

  // That torch works on.
  Stream stream() const;
  Gpu gpu() const;
  // Where a workspace is. An op that needs more than was given refuses.
  void* workspace(const char* op, int64_t index, size_t bytes) const;

 private:
  struct Current;
  std::unique_ptr<Current> current_;
};

// More rows are worked on in parts of so many, which keeps the workspace small. A part
// fills the largest GPU several times over.
constexpr int64_t kRowsAtOnce = 2048;
constexpr int64_t kTokensAtOnce = 1024;  // of routed experts

}  // namespace exl3::ops
