// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Kernels for many rows, for x86 with AMX-INT8 and AVX512-FP16: Sapphire Rapids and
// later.
#pragma once

#include "exl3/cpu/kernel.h"

namespace exl3::cpu {

// Whether the machine has AMX-INT8 and the system lets this process use it.
bool has_amx();

extern const Kernel kAmx[kCodebooks];

}  // namespace exl3::cpu
