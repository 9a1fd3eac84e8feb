// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Shared memory that blocks are launched with. It is chosen at launch, so machine code
// doesn't hold it; here the last template argument of an empty kernel does, and so the
// kernel's name. For test_budgets.py.
#include "exl3/kernels/dequantize.cuh"
#include "exl3/kernels/gemm.cuh"
#include "exl3/kernels/moe_gemm.cuh"
#include "exl3/kernels/words.h"

using namespace exl3;

template <int kRows, int kWords, int kBytes>
__global__ void gemm_probe() {}
template <int kRows, int kBytes>
__global__ void moe_gate_up_probe() {}
template <int kRows, int kBytes>
__global__ void moe_down_probe() {}
template <int kWords, int kBytes>
__global__ void dequantize_probe() {}

#define EXL3_GEMM(rows, words) \
  template __global__ void gemm_probe<rows, words, kGemmSharedBytes<rows, words>>();
#define EXL3_PROBES(words)                                            \
  EXL3_GEMM(16, words)                                                \
  EXL3_GEMM(32, words)                                                \
  EXL3_GEMM(48, words)                                                \
  EXL3_GEMM(64, words) EXL3_GEMM(128, words) template __global__ void \
  dequantize_probe<words, kDequantizeSharedBytes<words>>();

#define EXL3_MOE(rows)                                                    \
  template __global__ void moe_gate_up_probe<rows, kGateUpBytes<rows>>(); \
  template __global__ void moe_down_probe<rows, kDownBytes<rows>>();

// clang-format off
EXL3_FOR_EACH_WORDS(EXL3_PROBES)
EXL3_MOE(16) EXL3_MOE(32) EXL3_MOE(64)
