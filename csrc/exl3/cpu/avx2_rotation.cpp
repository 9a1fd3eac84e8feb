// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#if defined(__x86_64__)

#define EXL3_TARGET __attribute__((target("avx2,fma,f16c")))
#define EXL3_VECTOR_BYTES 32
#include "exl3/cpu/rotation_body.h"

namespace exl3::cpu {

const Rotation kAvx2Rotation{rotate_input, rotate_output, add, store};

}  // namespace exl3::cpu

#endif
