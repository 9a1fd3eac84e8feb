# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Faults seeded into the kernels of routed experts: each must be caught by its name."""

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.emulated.experts import HIDDEN, make_experts, reference, route
from tests.kernels.emulated.moe import EmulatedMoe
from tests.kernels.emulated.mutant import Mutant
from tests.kernels.emulated.ops import EmulatorFault, Run

MUTANTS = [
    Mutant(
        "lanes of a warp choose the same row",
        "moe_route.cuh",
        "__popc(lanes & ((1u << lane) - 1))",
        "__popc(lanes & 0u)",
        "race",
    ),
    Mutant(
        "the last tile has rows of the next expert",
        "moe_route.cuh",
        "min(p.block_rows, rows - start)",
        "p.block_rows",
        "out-of-bounds|uninitialized|unordered|wrong",
    ),
    Mutant(
        "the number of rows isn't stored",
        "moe_route.cuh",
        "    ptx::store_global(&p.totals->rows, first_row);\n",
        "",
        "uninitialized",
    ),
    Mutant(
        "ids that name no expert are looked up",
        "moe_route.cuh",
        "  if (id < 0 || id >= p.routed_experts) return -1;\n",
        "",
        "out-of-bounds",
    ),
    Mutant(
        "rows are rotated before they are placed",
        "moe_rows.cuh",
        "  ptx::wait_for_previous_launch();\n  if (slice >=",
        "  if (slice >=",
        "unordered",
    ),
    Mutant(
        "pairs of experts elsewhere are added up",
        "moe_rows.cuh",
        "    if (row < 0) continue;\n",
        "",
        "out-of-bounds|uninitialized",
    ),
    Mutant(
        "only the first slice is added up",
        "moe_rows.cuh",
        "for (int slice = 0; slice < p.slices; ++slice) {",
        "for (int slice = 0; slice < 1; ++slice) {",
        "wrong",
    ),
    Mutant(
        "up's stages are copied while gate's are read",
        "moe_gemm.cuh",
        "    __syncthreads();  // gate's stages are read before up's are copied\n",
        "",
        "race|in-flight",
    ),
    Mutant(
        "gate's result lies in the stages",
        "moe_gemm.cuh",
        "const uint32_t gate_result = base + kMoeLoopBytes<kRows>;",
        "const uint32_t gate_result = base;",
        "race|wrong|in-flight|uninitialized",
    ),
    Mutant(
        "tiles that there aren't are worked on",
        "moe_gemm.cuh",
        "if (tile >= ptx::load_global(&p.totals->tiles)) return false;",
        "",
        "uninitialized",
    ),
    Mutant(
        "slices share one expert's weights",
        "moe_gemm.cuh",
        "int64_t{block.tile.expert} * p.slices + block.slice;",
        "int64_t{block.tile.expert} * p.slices;",
        "wrong",
    ),
    Mutant(
        "up is scaled as gate",
        "moe_gemm.cuh",
        "(block.expert * 2 + 1) * p.intermediate",
        "(block.expert * 2 + 0) * p.intermediate",
        "wrong",
    ),
    Mutant(
        "gate's and up's parts are one",
        "moe_gemm.cuh",
        "int64_t{2} * split + projection;",
        "int64_t{2} * split + 0 * projection;",
        "wrong",
    ),
]


def build(overlay: Path | None) -> EmulatedMoe:
    return EmulatedMoe([48], overlay=overlay, optimize="-O0")


def verdict(op: EmulatedMoe) -> str:
    """The first fault's message, "wrong", "schedule", or nothing."""
    rng = np.random.default_rng(3)
    layer = make_experts(4, slices=2, kinds=((48, 1),))
    x = rng.normal(size=(19, HIDDEN)).astype(np.float32)
    ids, weights = route(rng, 19, 3, 6)
    ids[5, 1] = -1
    ids[7, 0] = 99
    expert_map = np.array([2, -1, 0, 3, -1, 1], np.int32)
    known = np.where(ids < 6, ids, -1)
    want = reference(layer, x, known, weights, expert_map)
    first = None
    try:
        for schedule in (0, 1, 3, 6):
            for splits in ((1, 1), (2, 2)):
                run = Run(schedule=schedule, launches=2)
                got = op(
                    *(x, ids, weights),
                    **layer.tensors,
                    slices=2,
                    expert_map=expert_map,
                    splits=splits,
                    run=run,
                )
                if not np.sqrt(np.mean((got - want) ** 2)) < 6e-4 * want.std():
                    return "wrong"
            if first is None:
                first = got
            elif not np.array_equal(first, got):
                return "schedule"
    except EmulatorFault as fault:
        return str(fault)
    return ""


def test_the_kernels_as_they_are() -> None:
    assert verdict(build(None)) == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.check(verdict(build(mutant.write(tmp_path))))
