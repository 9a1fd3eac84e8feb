// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#pragma once

#include "exl3/encode/step.h"

namespace exl3::encode {

// The search with the best instruction set that may be used, see cpu::usable_isa.
Tier usable_tier();

}  // namespace exl3::encode
