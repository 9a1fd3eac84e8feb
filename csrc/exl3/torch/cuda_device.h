// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What the ops need of a GPU: its current stream, its size, and memory to work in.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>

#include "exl3/launch/stream.h"

namespace exl3::ops {

// The stream that torch works on. It stands in libtorch_cuda, which a CPU build of
// torch lacks: so it's looked up at the first call, and the library loads everywhere.
Stream current_stream(int32_t device);

int multiprocessors(int32_t device);

// The memory that ops called with this index work in: a contiguous uint8 tensor. Ops of
// one index must run one after another; those of two may overlap.
constexpr int64_t kWorkspaces = 8;
void set_workspace(const torch::stable::Tensor& workspace, int64_t index);

// Where the workspace is. An op that needs more than was given refuses.
void* workspace(const char* op, int32_t device, int64_t index, size_t bytes);

}  // namespace exl3::ops
