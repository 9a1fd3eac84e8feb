// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// A trellis matrix as plain floats.
#pragma once

#include <cstdint>

#include "exl3/cpu/kernel.h"
#include "exl3/cpu/parallel.h"

namespace exl3::cpu {

// out [k, n] = diag(suh) H W H diag(svh). Without suh [k] nothing is done on the left,
// without svh [n] nothing on the right; without both, out is W itself.
void dequant(const Trellis& w, int64_t n, const uint16_t* suh, const uint16_t* svh,
             float* out, Isa isa, const ParallelFor& parallel);

}  // namespace exl3::cpu
