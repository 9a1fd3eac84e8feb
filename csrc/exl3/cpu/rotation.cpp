// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project

#define EXL3_TARGET
#define EXL3_VECTOR_BYTES 16
#include "exl3/cpu/rotation_body.h"

namespace exl3::cpu {

const Rotation kPortableRotation{rotate_input, rotate_output, add, store};

}  // namespace exl3::cpu
