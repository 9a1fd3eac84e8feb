// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#pragma once

#include "exl3/encode/step.h"

namespace exl3::encode {

// The fastest tier that this CPU has. EXL3_CPU_ISA, where set, names the best one to
// use: avx512, avx2 or portable. Chosen once.
const Tier& tier();

}  // namespace exl3::encode
