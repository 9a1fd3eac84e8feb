// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Starts the dequantization of a matrix.
#pragma once

#include "exl3/kernels/params.h"
#include "exl3/launch/stream.h"

namespace exl3 {

void launch_dequantize(int words, Codebook codebook, Stream stream,
                       const DequantizeParams& params);

// Its parts, one for each number of words (dequantize.cu).
template <int kWords>
void launch_dequantize(Codebook codebook, Stream stream,
                       const DequantizeParams& params);

}  // namespace exl3
