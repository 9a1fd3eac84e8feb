// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// The experts' first product, in blocks of 32 rows.
#include "exl3/launch/moe_gemm.cuh"

template void exl3::launch_moe_gate_up<32>(int, Stream, const MoeParams&);
