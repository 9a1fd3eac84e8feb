// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
//
// One op of routed experts on a device: six launches, each a fixed grid of the worst
// case, so that a graph can hold them and nobody waits for the router's choice.
#pragma once

#include <cstddef>

#include "exl3/kernels/moe_params.h"
#include "exl3/launch/stream.h"
#include "exl3/launch/workspace.h"

namespace exl3 {

// How the work is cut into blocks.
struct MoePlan {
  int block_rows;      // 16, 32 or 64
  int gate_up_splits;  // of hidden
  int down_splits;     // of intermediate
};

// The plan for the op's sizes, on a GPU of so many multiprocessors. `params` need only
// have sizes. With `batch_invariant` a token's result doesn't depend on other tokens.
MoePlan choose_moe_plan(const MoeParams& params, int multiprocessors,
                        bool batch_invariant);

// Bytes of workspace that the plan needs (workspace.h).
size_t moe_workspace_bytes(const MoeParams& params, const MoePlan& plan);

// params: tensors and sizes; the workspace's parts are set here.
void moe(MoeParams params, const MoePlan& plan, void* workspace, Stream stream);

// The parts of the workspace that `moe` sets, and its end: for the emulator's checks.
char* lay_out_workspace(MoeParams& params, const MoePlan& plan, void* workspace);

// The products, one kernel for each number of rows (moe_gate_up_*.cu, moe_down_*.cu).
template <int kRows>
void launch_moe_gate_up(int splits, Stream stream, const MoeParams& params);
template <int kRows>
void launch_moe_down(int splits, Stream stream, const MoeParams& params);

}  // namespace exl3
