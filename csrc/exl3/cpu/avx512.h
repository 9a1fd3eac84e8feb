// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Kernels for x86 with AVX-512 F, BW, DQ, VL, VBMI and VNNI: Ice Lake, Zen 4 and later.
#pragma once

#include "exl3/cpu/kernel.h"

namespace exl3::cpu {

extern const Kernel kAvx512Float[kCodebooks];
extern const Kernel kAvx512Exact[kCodebooks];
extern const Kernel kAvx512Mul1;  // activations in 16 bits
// With AVX512-FP16 as well, for few rows: Sapphire Rapids and later.
extern const Kernel kAvx512Fp16[kCodebooks];

}  // namespace exl3::cpu
