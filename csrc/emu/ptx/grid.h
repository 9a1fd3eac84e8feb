// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Twin of exl3/ptx/grid.cuh. Launches run one after another here; what is checked is
// that a programmatic launch waits before it touches what the one before may still use.
#pragma once

#include "emu/device.h"

namespace ptx {

inline void wait_for_previous_launch() { emu::current->waited_for_grid = true; }
inline void allow_next_launch() {}

}  // namespace ptx
