# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The ops on a device against the readable reference, in float64 on the CPU."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.device.layers import Experts, Matrix, random_experts, random_matrix
from exl3 import ops, workspace
from exl3.codec.decode import decode_weight, inner_matrix
from exl3.format.constants import TILE, Codebook
from exl3.plans import Plan

#: The CUDA kernels hold transformed activations in fp16, which is 2.1e-4; the tests of
#: the emulator have the same bound. Results in fp16 and bf16 are rounded once more.
BOUND = 3e-4
#: Weights that nobody rounds to fp16 differ by up to 3e-4 from those of the format.
UNROUNDED_BOUND = 5e-4
ROUNDING = {
    torch.float32: 0.0,
    torch.float16: 2**-10 / 12**0.5,
    torch.bfloat16: 2**-7 / 12**0.5,
}
#: Two products and an activation between them.
MOE_BOUND = 3 * BOUND

#: Every rate and codebook: (words of a tile, codebook).
RATES = [
    *((16 * bits, codebook) for codebook in range(3) for bits in range(1, 9)),
    *((words, 2) for words in (24, 40, 56)),
]
#: One of each size of a block of rows, with rows to spare and without.
ROWS = (1, 16, 17, 32, 40, 48, 64, 100, 128, 300)
RANDOM_SHAPES = 100
#: Routed experts, and how many of them a token has.
MOE_WIDTHS = ((1, 1), (5, 2), (28, 8), (56, 8), (256, 8))
MOE_TOKENS = (1, 2, 5, 8, 9, 33, 200)


def check_linear(device: torch.device, deadline: float) -> dict[str, Any]:
    """Every rate, codebook and block of rows, with k split and not; random shapes."""

    def cases() -> Iterator[tuple[Matrix, int, torch.dtype, bool]]:
        for words, codebook in RATES:
            matrix = random_matrix(2048, 256, words, codebook, device)
            for rows in ROWS:
                for invariant in (False, True):
                    yield matrix, rows, torch.float32, invariant
        draw = random.Random(0)
        for _ in range(RANDOM_SHAPES):
            words, codebook = draw.choice(RATES)
            k, n = 128 * draw.randint(1, 24), 128 * draw.randint(1, 12)
            matrix = random_matrix(k, n, words, codebook, device)
            dtype = draw.choice(list(ROUNDING))
            yield matrix, draw.randint(1, 200), dtype, draw.random() < 0.5

    weights: dict[int, torch.Tensor] = {}  # of the newest matrix
    worst = {dtype: 0.0 for dtype in ROUNDING}
    plans: set[tuple[int, ...]] = set()
    failures: list[str] = []
    checked = 0
    for matrix, rows, dtype, invariant in cases():
        if time.monotonic() > deadline:
            failures.append("out of time")
            break
        if id(matrix) not in weights:
            weights = {id(matrix): reference_weight(matrix)}
        x = torch.randn(rows, matrix.k, device=device).to(dtype)
        error, wrong = _compare(
            x, matrix, weights[id(matrix)], BOUND, exact=True, batch_invariant=invariant
        )
        worst[dtype] = max(worst[dtype], error)
        failures += wrong
        if device.type == "cuda":
            plan = ops.linear_plan(
                rows,
                matrix.k,
                matrix.shards,
                *workspace.gpu(device),
                exact=True,
                batch_invariant=invariant,
            )
            plans.add(tuple(plan))
        checked += 1
    return {
        "cases": checked,
        "worst_error": {str(dtype): error for dtype, error in worst.items()},
        "plans": sorted(plans),  # what ops.linear_plan gives, of all that was run
        "failures": failures,
    }


def check_plans(device: torch.device, deadline: float) -> dict[str, Any]:
    """Unrounded weights and uneven splits of k, which only a plan asks for."""
    failures: list[str] = []
    worst = 0.0
    checked = 0
    for words, codebook in RATES:
        matrix = random_matrix(1024, 256, words, codebook, device)
        weight = reference_weight(matrix)
        for rows, splits in ((1, 1), (16, 3), (40, 2)):
            if time.monotonic() > deadline:
                return {"cases": checked, "failures": [*failures, "out of time"]}
            if device.type == "cuda":
                architecture = "{}.{}".format(*torch.cuda.get_device_capability(device))
                plan = Plan(architecture, 1024, 256, (rows, rows), 16, splits, True)
                ops.set_plans([plan])
            x = torch.randn(rows, matrix.k, device=device)
            error, wrong = _compare(x, matrix, weight, UNROUNDED_BOUND, exact=False)
            worst = max(worst, error)
            failures += wrong
            checked += 1
    if device.type == "cuda":
        ops.set_plans([])
    return {"cases": checked, "worst_error": worst, "failures": failures}


def _compare(
    x: torch.Tensor,
    matrix: Matrix,
    weight: torch.Tensor,
    bound: float,
    **options: bool,
) -> tuple[float, list[str]]:
    """The error of a product by `ops.linear`, and what is wrong with it."""
    need = workspace.linear_bytes(len(x), matrix.k, matrix.shards, x.device)
    workspace.reserve(x.device, need)
    # Twice: the first run must leave the workspace as it found it.
    runs = [
        ops.linear(
            x,
            matrix.trellis,
            matrix.suh,
            matrix.svh,
            None,
            matrix.shards,
            **options,
        )
        for _ in range(2)
    ]
    error = relative_error(runs[0], x.double().cpu() @ weight)
    case = (
        f"[{len(x)}, {matrix.k}] x [{matrix.k}, {matrix.n}], {matrix.words} words, "
        f"codebook {matrix.codebook}, {x.dtype}, {options}"
    )
    failures = []
    if not error < bound + ROUNDING[x.dtype]:
        failures.append(f"{case}: error {error:.2e}")
    if not torch.equal(*runs):
        failures.append(f"{case}: two runs differ")
    return error, failures


def check_dequant(device: torch.device, deadline: float) -> dict[str, Any]:
    """Inner matrices, bit for bit, for every rate and codebook."""
    failures = []
    checked = 0
    for words, codebook in RATES:
        if time.monotonic() > deadline:
            failures.append("out of time")
            break
        matrix = random_matrix(256, 384, words, codebook, device)
        got = ops.dequant(matrix.trellis, None, None, 256, 384, words, codebook)
        if not torch.equal(
            got.cpu(), inner_matrix(matrix.stored(), Codebook(codebook))
        ):
            failures.append(f"{words} words, codebook {codebook}: values differ")
        checked += 1
    return {"cases": checked, "failures": failures}


def check_moe(device: torch.device, deadline: float) -> dict[str, Any]:
    """Mixed bits, empty experts, skipped slots, an expert map."""
    hidden, intermediate = 512, 256
    failures: list[str] = []
    worst = 0.0
    checked = 0
    for width, top_k in MOE_WIDTHS:
        words = [16 * (2, 3, 4, 6)[e % 4] for e in range(width)]
        experts = random_experts(hidden, intermediate, words, 1 + width % 2, device)
        for tokens in MOE_TOKENS:
            if time.monotonic() > deadline:
                return {"cases": checked, "failures": [*failures, "out of time"]}
            ids = torch.stack([torch.randperm(width)[:top_k] for _ in range(tokens)])
            ids[torch.rand(ids.shape) < 0.1] = -1
            weights = torch.rand(tokens, top_k)
            x = torch.randn(tokens, hidden)
            need = workspace.moe_bytes(
                tokens, top_k, hidden, intermediate, width, 1, device
            )
            workspace.reserve(device, need)
            runs = [
                run_moe(experts, x.to(device), ids.to(device), weights.to(device))
                for _ in range(2)
            ]
            error = relative_error(runs[0], reference_moe(experts, x, ids, weights))
            worst = max(worst, error)
            case = f"{width} experts, top {top_k}, {tokens} tokens"
            if not error < MOE_BOUND:
                failures.append(f"{case}: error {error:.2e}")
            if not torch.equal(*runs):
                failures.append(f"{case}: two runs differ")
            checked += 1
    return {"cases": checked, "worst_error": worst, "failures": failures}


#: What runs before any speed is measured.
CHECKS: dict[str, Callable[[torch.device, float], dict[str, Any]]] = {
    "dequant": check_dequant,
    "linear": check_linear,
    "plans": check_plans,
    "moe": check_moe,
}


def run_moe(
    experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The op on these experts, all of them local."""
    return ops.moe(
        x,
        ids,
        weights,
        experts.w13,
        experts.w2,
        experts.table,
        experts.suh13,
        experts.svh13,
        experts.suh2,
        experts.svh2,
        slices=1,
        exact=True,
    )


def reference_weight(matrix: Matrix) -> torch.Tensor:
    """float64 [k, n] on the CPU, by exl3.codec, which shares no code with the ops."""
    return decode_weight(
        matrix.stored(),
        matrix.suh[0].cpu(),
        matrix.svh.cpu(),
        Codebook(matrix.codebook),
        torch.float64,
    )


def reference_moe(
    experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """float64 [tokens, hidden] on the CPU."""
    hidden, intermediate = x.shape[1], experts.suh2.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in ids.unique().tolist():
        if e < 0:
            continue
        tokens, slots = torch.where(ids == e)

        def weight(code: int, expert: int = e) -> torch.Tensor:
            offset, words, codebook = experts.table[expert, code].tolist()
            k, n = (intermediate, hidden) if code == 2 else (hidden, intermediate)
            slab = experts.w2 if code == 2 else experts.w13
            size = k * n // TILE**2 * words
            suh = experts.suh2[expert] if code == 2 else experts.suh13[expert, code]
            svh = experts.svh2[expert] if code == 2 else experts.svh13[expert, code]
            trellis = slab[offset : offset + size]
            return reference_weight(
                Matrix(k, n, words, codebook, trellis, suh.unsqueeze(0), svh)
            )

        rows = x[tokens].double()
        gate, up = rows @ weight(0), rows @ weight(1)
        down = (torch.nn.functional.silu(gate) * up) @ weight(2)
        out.index_add_(0, tokens, down * weights[tokens, slots].double().unsqueeze(1))
    return out


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, over that of what was wanted."""
    scale = wanted.square().mean().sqrt()
    difference = (got.double().cpu() - wanted).square().mean().sqrt()
    return float(difference / scale) if scale > 0 else float(difference)
