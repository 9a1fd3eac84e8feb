// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What kernels need beyond CUDA C++: checked access to memory, asynchronous copies, the
// tensor core, packed half arithmetic. This folder is the only inline assembly; the
// host emulator (csrc/emu/ptx) is a second implementation of it, function by function.
#pragma once

#if defined(EXL3_EMU)
#include "emu/cuda.h"
#include "emu/ptx/async.h"
#include "emu/ptx/grid.h"
#include "emu/ptx/half.h"
#include "emu/ptx/matrix.h"
#include "emu/ptx/memory.h"
#else
#include "exl3/ptx/async.cuh"
#include "exl3/ptx/grid.cuh"
#include "exl3/ptx/half.cuh"
#include "exl3/ptx/matrix.cuh"
#include "exl3/ptx/memory.cuh"
#endif
