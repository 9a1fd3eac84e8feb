// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The experts' second product, in blocks of 64 rows.
#include "exl3/launch/moe_gemm.cuh"

template void exl3::launch_moe_down<64>(int, Stream, const MoeParams&);
