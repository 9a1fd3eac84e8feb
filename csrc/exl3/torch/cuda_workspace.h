// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The memory that ops work in. It is given before the first call, and so is known
// before the rest of the GPU's memory is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace exl3::ops {

// Ops of one index must run one after another; those of two may overlap.
constexpr int64_t kWorkspaces = 8;

// Where a workspace is. Refuses if fewer bytes were given.
void* find_workspace(const char* op, int32_t device, int64_t index, size_t bytes);

}  // namespace exl3::ops
