// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Starts the dense product.
#pragma once

#include "exl3/kernels/params.h"
#include "exl3/launch/plan.h"
#include "exl3/launch/stream.h"

namespace exl3 {

void launch_gemm(int words, Codebook codebook, const LinearPlan& plan, Stream stream,
                 const GemmParams& params);

// Its parts, one for each number of words (gemm.cu).
template <int kWords>
void launch_gemm(Codebook codebook, const LinearPlan& plan, Stream stream,
                 const GemmParams& params);

}  // namespace exl3
