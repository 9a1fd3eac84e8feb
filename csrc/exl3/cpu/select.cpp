// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
#include "exl3/cpu/kernel.h"
#include "exl3/cpu/portable.h"

namespace exl3::cpu {

const Kernel& select_kernel(Codebook, int64_t, bool) { return kPortable; }

}  // namespace exl3::cpu
