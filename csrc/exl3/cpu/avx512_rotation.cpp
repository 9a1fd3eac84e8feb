// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#if defined(__x86_64__)

#define EXL3_TARGET                                                             \
  __attribute__((                                                               \
      target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prefer-vector-width=" \
             "512")))
#define EXL3_VECTOR_BYTES 64
#include "exl3/cpu/rotation_body.h"

namespace exl3::cpu {

const Rotation kAvx512Rotation{rotate_input, rotate_output, add, store};

}  // namespace exl3::cpu

#endif
