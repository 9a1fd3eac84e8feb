// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// What kernels are compiled for: every number of int16 words that a tile can have, and
// every number of rows of a block. The build compiles a .cu that uses EXL3_WORDS once
// with each number.
#pragma once

// A build may name fewer: the emulator's mutants need one of each.
// clang-format off
#if !defined(EXL3_FOR_EACH_WORDS)
#define EXL3_FOR_EACH_WORDS(apply)                              \
  apply(16) apply(24) apply(32) apply(40) apply(48) apply(56)   \
  apply(64) apply(80) apply(96) apply(112) apply(128)
#endif
#if !defined(EXL3_FOR_EACH_BLOCK_ROWS)
#define EXL3_FOR_EACH_BLOCK_ROWS(apply) \
  apply(16) apply(32) apply(48) apply(64) apply(128)
#endif
// clang-format on
