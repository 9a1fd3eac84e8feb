// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Kernels for x86 with AVX2, FMA and F16C.
#pragma once

#include "exl3/cpu/kernel.h"

namespace exl3::cpu {

extern const Kernel kAvx2Float[kCodebooks];
extern const Kernel kAvx2Exact[kCodebooks];
extern const Kernel kAvx2Mul1;  // activations in 16 bits

}  // namespace exl3::cpu
