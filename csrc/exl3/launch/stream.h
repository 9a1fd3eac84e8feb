// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Where launches queue up.
#pragma once

namespace exl3 {

// A cudaStream_t; the emulator has none and runs launches at once.
using Stream = void*;

}  // namespace exl3
