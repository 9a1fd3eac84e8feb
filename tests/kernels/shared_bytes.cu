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
#include "exl3/launch/plan.h"

using namespace exl3;

template <int kRows, int kWords, Decoder kDecoder, int kBytes>
__global__ void gemm_probe() {}
template <int kRows, int kBytes>
__global__ void moe_gate_up_probe() {}
template <int kRows, int kBytes>
__global__ void moe_down_probe() {}
template <int kWords, int kBytes>
__global__ void dequantize_probe() {}

// clang-format off
#define EXL3_GEMM(rows, words, decoder)                            \
  template __global__ void gemm_probe<rows, words, decoder,        \
      kGemmSharedBytes<rows, words, copies_of(decoder)>>();
#define EXL3_GEMMS(words, decoder)                                 \
  EXL3_GEMM(16, words, decoder) EXL3_GEMM(32, words, decoder)      \
  EXL3_GEMM(48, words, decoder) EXL3_GEMM(64, words, decoder)      \
  EXL3_GEMM(128, words, decoder)
#define EXL3_PROBES(words)                                         \
  EXL3_GEMMS(words, Decoder::kHalves)                              \
  EXL3_GEMMS(words, Decoder::kBytes)                               \
  EXL3_GEMM(kUnroundedRows, words, Decoder::kUnrounded)            \
  EXL3_GEMM(kUnroundedRows, words, Decoder::kIntegers)             \
  template __global__ void                                         \
  dequantize_probe<words, kDequantizeSharedBytes<words>>();

#define EXL3_MOE(rows)                                                    \
  template __global__ void moe_gate_up_probe<rows, kGateUpBytes<rows>>(); \
  template __global__ void moe_down_probe<rows, kDownBytes<rows>>();

EXL3_FOR_EACH_WORDS(EXL3_PROBES)
EXL3_MOE(16) EXL3_MOE(32) EXL3_MOE(64)
