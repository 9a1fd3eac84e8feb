// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Plain C++ for any machine, and the reference for the other kernels.
#pragma once

#include "exl3/cpu/kernel.h"

namespace exl3::cpu {

// The values of a codebook's states, [65536].
const float* codebook_table(Codebook codebook);

// Decodes a tile to `out` [16, 16], of row stride `stride`.
void decode_tile(const uint16_t* tile, int words, const float* table, float* out,
                 int64_t stride);

extern const Kernel kPortable[kCodebooks];

}  // namespace exl3::cpu
