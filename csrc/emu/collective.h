// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Warp collectives: what all 32 lanes do together.
#pragma once

#include "emu/device.h"

namespace emu {

// Every lane calls this with an operand of its own. The lane that comes last runs
// compute(lanes), which reads all operands and writes the results back into them.
template <class Operand, class Compute>
void collective(const char* name, Operand& operand, Here here, Compute compute) {
  if (!device->arrive(name, &operand, here)) return;
  Warp& warp = *current->warp;
  compute(reinterpret_cast<Operand* const*>(warp.operands));
  device->release(warp);
}

}  // namespace emu
