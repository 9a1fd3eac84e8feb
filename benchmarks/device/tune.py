# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Finds the fastest plans of `ops.linear` on this GPU (`exl3.plans`)."""

import time
from collections.abc import Iterator, Sequence

import torch

from benchmarks.device.correctness import relative_error
from benchmarks.device.layers import Matrix, random_matrix
from benchmarks.device.timing import copies_beyond_cache, seconds_per_call
from exl3 import ops, workspace
from exl3.plans import BLOCK_ROWS, UNROUNDED_ROWS, Plan

#: First and last rows of a plan; the last are measured.
ROW_RANGES = (
    *((1, 1), (2, 4), (5, 8), (9, 16), (17, 32), (33, 48), (49, 64), (65, 128)),
    *((129, 256), (257, 512), (513, 1024), (1025, 2048)),
)
SPLITS = (1, 2, 3, 4, 6, 8)
#: A plan must be faster than the rule's by this factor: less is noise.
GAIN = 1.02
#: Between two plans: fp16 activations are the same, sums over k are not. Unrounded
#: weights differ by 2.3e-4.
BOUND = 4e-4
CODEBOOK = 1  # mcg, which has both kinds of weights


def candidates(
    architecture: str, k: int, n: int, rows: tuple[int, int], unrounded: bool
) -> Iterator[Plan]:
    """Plans that may be the fastest for so many rows.

    Blocks are no larger than the rows need; k is not split where blocks are many.
    """
    enough = next((b for b in BLOCK_ROWS if b >= rows[1]), BLOCK_ROWS[-1])
    for block_rows in (b for b in BLOCK_ROWS if b <= enough):
        if rows[1] > 16 * block_rows:
            continue
        for splits in SPLITS if rows[1] <= 128 else SPLITS[:2]:
            if splits * 256 > k:
                continue
            plan = Plan(architecture, k, n, rows, block_rows, splits)
            yield plan
            if unrounded and block_rows == UNROUNDED_ROWS:
                yield Plan(architecture, k, n, rows, block_rows, splits, True)


def tune(
    device: torch.device,
    shapes: Sequence[tuple[int, int]],
    bits: int,
    unrounded: bool,
    deadline: float,
) -> Iterator[tuple[Plan | None, str]]:
    """Measures plan after plan.

    Args:
        device: The GPU.
        shapes: (k, n) of what a model multiplies with, n of fused matrices together.
        bits: Of the matrices that are measured with.
        unrounded: Whether plans may leave weights unrounded.
        deadline: On the clock of time.monotonic.

    Yields:
        For each shape and range of rows the fastest plan, or None if the rule's is as
        good, and a line that says so.

    Raises:
        RuntimeError: A plan's result is wrong.
    """
    major, minor = torch.cuda.get_device_capability(device)
    for k, n in shapes:
        copies = copies_beyond_cache(k * n * bits // 8, device)
        matrices = [
            random_matrix(k, n, 16 * bits, CODEBOOK, device) for _ in range(copies)
        ]
        for rows in ROW_RANGES:
            if time.monotonic() > deadline:
                yield None, f"k {k}, n {n}, rows {rows[0]} to {rows[1]}: out of time"
                continue
            x = torch.randn(rows[1], k, device=device, dtype=torch.bfloat16)
            wanted, by_rule = _run(None, x, matrices)
            best, fastest = None, by_rule / GAIN
            for plan in candidates(f"{major}.{minor}", k, n, rows, unrounded):
                got, seconds = _run(plan, x, matrices)
                error = relative_error(got, wanted.double().cpu())
                if not error < BOUND + 2**-7:  # both were rounded to bfloat16
                    raise RuntimeError(f"{plan} differs from the rule's by {error:.1e}")
                if seconds < fastest:
                    best, fastest = plan, seconds
            took = f"{by_rule * 1e6:.1f} us by the rule"
            if best is not None:
                took += f", {fastest * 1e6:.1f} us by {best}"
            yield best, f"k {k}, n {n}, rows {rows[0]} to {rows[1]}: {took}"


def _run(
    plan: Plan | None, x: torch.Tensor, matrices: list[Matrix]
) -> tuple[torch.Tensor, float]:
    """The first matrix's result with this plan, or the rule's, and the time of one."""
    ops.set_plans([] if plan is None else [plan])
    shards = matrices[0].shards
    need = workspace.linear_bytes(len(x), x.shape[1], shards, x.device)
    workspace.reserve(x.device, need)

    def call(m: Matrix) -> torch.Tensor:
        return ops.linear(x, m.trellis, m.suh, m.svh, None, m.shards)

    got = call(matrices[0])
    seconds = seconds_per_call([lambda m=matrix: call(m) for matrix in matrices])
    ops.set_plans([])
    return got, seconds
