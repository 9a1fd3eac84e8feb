// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// Starts the Hadamard transform of rows.
#pragma once

#include "exl3/kernels/params.h"
#include "exl3/launch/stream.h"

namespace exl3 {

void launch_transform(Stream stream, const TransformParams& params);
void launch_quantize(Stream stream, const QuantizeParams& params);

}  // namespace exl3
