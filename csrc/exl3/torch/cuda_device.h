// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What the ops need of a GPU: its current stream, its size, and memory to work in.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "exl3/launch/stream.h"

namespace exl3::ops {

// The GPU of one op's result; the current one as long as this lives.
class Device {
 public:
  explicit Device(const torch::stable::Tensor& result);
  ~Device();

  // That torch works on.
  Stream stream() const;
  int multiprocessors() const;
  // Where a workspace is. An op that needs more than was given refuses.
  void* workspace(const char* op, int64_t index, size_t bytes) const;

 private:
  struct Current;
  std::unique_ptr<Current> current_;
};

// The memory that ops called with this index work in: contiguous uint8 [bytes]. Ops of
// one index must run one after another; those of two may overlap.
constexpr int64_t kWorkspaces = 8;
void set_workspace(const torch::stable::Tensor& workspace, int64_t index);

}  // namespace exl3::ops
