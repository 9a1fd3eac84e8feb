// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Which instructions this machine has.
#pragma once

namespace exl3::cpu {

// Instruction sets that kernels are written for, each including those before it.
enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Fp16, kAmx };

// The best that this machine has. The environment's EXL3_CPU_ISA (portable, avx2,
// avx512, avx512fp16 or amx), read at every call, forbids better ones.
Isa usable_isa();

}  // namespace exl3::cpu
