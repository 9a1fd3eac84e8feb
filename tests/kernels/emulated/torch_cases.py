# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Calls of the ops that cuda_ops.cpp must get right, by the CPU's ops and emulated.

    python -m tests.kernels.emulated.torch_cases

A process of its own: the emulated ops take the place of the CPU's. It prints, by case,
the error of the emulated result relative to the CPU's.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.device.correctness import relative_error
from benchmarks.device.layers import (
    Experts,
    Matrix,
    random_experts,
    random_matrix,
    random_scales,
)
from exl3 import ops
from exl3 import workspace as workspaces
from exl3.plans import Plan

CPU = torch.device("cpu")


def linear(
    x: Tensor,
    *matrices: Matrix,
    columns: list[tuple[int, int]] | None = None,
    bias: Tensor | None = None,
    exact: bool = True,
    batch_invariant: bool = False,
    workspace: int = 0,
) -> Tensor:
    """The op on matrices side by side; columns are (skip, keep) of each."""
    columns = columns or [(0, matrix.n) for matrix in matrices]
    shards = [
        number
        for m, (skip, keep) in zip(matrices, columns)
        for number in (m.n, skip, keep, m.words, m.codebook)
    ]
    rows = x.numel() // x.shape[-1]
    need = workspaces.linear_bytes(rows, matrices[0].k, shards, CPU)
    workspaces.reserve(CPU, need, workspace)
    return ops.linear(
        x,
        torch.cat([matrix.trellis for matrix in matrices]),
        torch.cat([matrix.suh for matrix in matrices]),
        torch.cat([matrix.svh for matrix in matrices]),
        bias,
        shards,
        exact=exact,
        batch_invariant=batch_invariant,
        workspace=workspace,
    )


def matrix(k: int, n: int, words: int, codebook: int) -> Matrix:
    return random_matrix(k, n, words, codebook, CPU)


def rows_beyond_one_part() -> Tensor:
    return linear(torch.randn(2050, 128), matrix(128, 128, 64, 1))


def split_k() -> Tensor:
    return linear(torch.randn(3, 2048), matrix(2048, 128, 48, 2))


def a_batch_of_one_or_many() -> Tensor:
    m, x = matrix(1024, 128, 64, 1), torch.randn(40, 1024)
    whole = linear(x, m, batch_invariant=True)
    for row in (0, 39):
        alone = linear(x[row : row + 1], m, batch_invariant=True)
        assert torch.equal(alone[0], whole[row])
    return whole


def measured_plans() -> Tensor:
    """Each plan shows in the result's last bits, for the rows that it names."""
    mcg, mul1 = matrix(1024, 128, 64, 1), matrix(1024, 128, 64, 2)
    x = torch.randn(9, 1024)

    def at(plan: Plan | None, *matrices: Matrix, **options: bool) -> Tensor:
        if emulated():
            ops.set_plans([] if plan is None else [plan])
        return linear(x, *matrices, **options)

    rule = at(None, mcg)
    whole = at(None, mcg, batch_invariant=True)
    plan = Plan("9.0", 1024, 128, (9, 9), 16, 1)
    split = replace(plan, splits=3, block_rows=32)
    loose = replace(plan, unrounded=True)
    results = [rule, at(plan, mcg), at(split, mcg), at(loose, mcg, exact=False)]
    integers = at(loose, mul1, exact=False)
    both = at(replace(loose, n=256), mcg, mul1, exact=False)
    if emulated():
        assert not torch.equal(rule, whole)
        assert torch.equal(results[1], whole)
        assert not torch.equal(results[2], rule) and not torch.equal(results[2], whole)
        assert not torch.equal(results[3], whole)
        assert not torch.equal(integers, at(plan, mul1))
        assert torch.equal(at(loose, mul1), at(plan, mul1))  # exact
        # Those that a plan is not for, or cannot change.
        for other in (
            replace(plan, rows=(8, 8)),
            replace(plan, rows=(10, 2048)),
            replace(plan, k=2048),
            replace(plan, n=256),
            replace(plan, architecture="9.1"),
        ):
            assert torch.equal(at(other, mcg), rule)
        assert torch.equal(at(loose, mcg), whole)  # exact
        assert torch.equal(at(split, mcg, batch_invariant=True), whole)
        assert torch.equal(both, torch.cat([whole, at(plan, mul1)], 1))
        # What is asked about is what runs: 4 multiprocessors, as torch_device.cpp has.
        of_mcg = [9, 1024, mcg.shards, 90, 4]
        for wanted in (split, loose):
            ops.set_plans([wanted])
            cut = [wanted.block_rows, wanted.splits, wanted.unrounded]
            assert ops.linear_plan(*of_mcg) == cut
            assert ops.linear_plan(*of_mcg, exact=True) == [*cut[:2], False]
        need = ops.linear_workspace(*of_mcg)
        ops.set_plans([])
        assert ops.linear_plan(*of_mcg) == [16, 2, 0]
        assert need - ops.linear_workspace(*of_mcg) == 9 * 1024 * 2 - 2 * 16 * 128 * 4
    return torch.cat([*results, integers, both], 1)


def emulated() -> bool:
    """Whether the CPU's ops have been replaced; only then are there plans."""
    return ops.has_cuda()


def values_beyond_half_precision() -> Tensor:
    """One input is, and becomes 128 of them; each workspace counts its own."""
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    m = matrix(256, 128, 64, 1)
    before = [workspaces.clamped(CPU, index) for index in (2, 3)]
    x[3, 5] = 1e30  # large enough, and the CPU does not clamp
    huge = linear(x, m, workspace=3)
    assert huge.isfinite().all()
    after = [workspaces.clamped(CPU, index) for index in (2, 3)]
    if emulated():
        assert before == [0, 0] and after == [0, 128]
    return huge[:3]


def shards_of_several_kinds() -> Tensor:
    shards = [matrix(256, 256, 64, 1), matrix(256, 128, 40, 2), matrix(256, 384, 48, 0)]
    columns = [(0, 256), (5, 100), (130, 254)]
    bias = torch.randn(610, dtype=torch.bfloat16)
    x = torch.randn(9, 256, dtype=torch.bfloat16)
    return linear(x, *shards, columns=columns, bias=bias)


def narrow_strided_and_batched() -> Tensor:
    x = torch.randn(2, 3, 200, dtype=torch.float16)[..., 50:150]
    return linear(x, matrix(128, 128, 96, 1), workspace=7)


def no_rows() -> Tensor:
    return linear(torch.randn(0, 128), matrix(128, 128, 64, 1))


def hadamard() -> Tensor:
    pre, post = random_scales(384, device=CPU), random_scales(384, device=CPU)
    return ops.hadamard(torch.randn(2, 5, 384), pre, post)


def dequant() -> Tensor:
    m = matrix(256, 128, 56, 2)
    return ops.dequant(m.trellis, m.suh[0], m.svh, m.k, m.n, m.words, m.codebook)


def experts(count: int, hidden: int = 256, intermediate: int = 128) -> Experts:
    words = [16 * (3, 4, 2, 6)[e % 4] for e in range(count)]
    return random_experts(hidden, intermediate, words, 1, CPU)


def moe(
    layer: Experts,
    x: Tensor,
    ids: Tensor,
    slices: int = 1,
    expert_map: Tensor | None = None,
    limit: float = math.inf,
) -> Tensor:
    weights = torch.rand(ids.shape)
    virtual_experts, intermediate = layer.suh2.shape
    hidden = layer.suh13.shape[-1]
    need = workspaces.moe_bytes(
        len(x), ids.shape[1], hidden, intermediate, virtual_experts, slices, CPU
    )
    workspaces.reserve(CPU, need)
    return ops.moe(
        x,
        ids,
        weights,
        layer.w13,
        layer.w2,
        layer.table,
        layer.suh13,
        layer.svh13,
        layer.suh2,
        layer.svh2,
        slices,
        expert_map,
        limit=limit,
        exact=True,
    )


def experts_of_several_bits() -> Tensor:
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(9)])
    return moe(experts(5), torch.randn(9, 256), ids)


def slices_and_a_limit() -> Tensor:
    ids = torch.stack([torch.randperm(3)[:2] for _ in range(5)]).int()
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    return moe(experts(6), x, ids, slices=2, limit=0.7)


def an_expert_map_and_narrow_tokens() -> Tensor:
    ids = torch.tensor([[0, 5], [3, -1], [2, 4], [1, 1]])
    table = torch.tensor([-1, 1, 0, -1, -1, 2], dtype=torch.int32)
    return moe(experts(3), torch.randn(4, 200), ids, expert_map=table)


def tokens_beyond_one_part() -> Tensor:
    ids = torch.randint(0, 4, (1030, 1))
    return moe(experts(4, 128, 128), torch.randn(1030, 128), ids)


def no_tokens() -> Tensor:
    return moe(experts(3), torch.randn(0, 256), torch.zeros(0, 2, dtype=torch.long))


CASES: dict[str, Callable[[], Tensor]] = {
    case.__name__: case
    for case in (
        rows_beyond_one_part,
        split_k,
        a_batch_of_one_or_many,
        measured_plans,
        values_beyond_half_precision,
        shards_of_several_kinds,
        narrow_strided_and_batched,
        no_rows,
        hadamard,
        dequant,
        experts_of_several_bits,
        slices_and_a_limit,
        an_expert_map_and_narrow_tokens,
        tokens_beyond_one_part,
        no_tokens,
    )
}


def run_all() -> dict[str, Tensor]:
    """The same inputs whenever it is called."""
    results = {}
    for name, case in CASES.items():
        torch.manual_seed(len(name))
        results[name] = case()
    return results


def main() -> None:
    from tests.kernels.emulated import torch_ops

    wanted = run_all()
    torch_ops.load()
    errors = {}
    for name, got in run_all().items():
        assert got.shape == wanted[name].shape and got.dtype == wanted[name].dtype
        whole = got.numel() == 0
        errors[name] = 0.0 if whole else relative_error(got, wanted[name].double())
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
