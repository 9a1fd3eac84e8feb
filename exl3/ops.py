# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The library's ops. Nothing else touches `exl3._C`.

Matrices are given to the ops in strip-major order: a stored trellis tensor
`[k / 16, n / 16, words]` becomes `[n / 16, k / 16, words]` (`stored.transpose(0, 1)`),
so that 16 columns are one stream of memory. A slab is a flat int16 tensor of such
matrices, one after another. Words, k and n as in `exl3.format`; codebook 0 is 3inst,
1 mcg and 2 mul1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, library

from exl3.plans import Plan, check_disjoint

#: The schemas that this file was written for; see kOpsVersion in bindings.cpp.
OPS_VERSION = 4

try:
    import exl3._C  # noqa: F401  (importing it registers the ops)
except ImportError as error:
    raise ImportError(
        f"exl3: the compiled ops are missing or do not load ({error}); "
        "build them with `pip install .` or `pip install -e .`"
    ) from error

_built = torch.ops.exl3.ops_version()
if _built != OPS_VERSION:
    raise ImportError(
        f"exl3: the compiled ops are version {_built} and this code needs "
        f"{OPS_VERSION}; build them anew with `pip install .` or `pip install -e .`"
    )


def ops_version() -> int:
    """Version of the compiled ops' schemas."""
    return torch.ops.exl3.ops_version()


def linear(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    shards: Sequence[int],
    exact: bool = False,
    batch_invariant: bool = False,
    workspace: int = 0,
) -> Tensor:
    """Multiplies activations with one or several EXL3 matrices, side by side.

    Args:
        x: `[..., features]`, float32, bfloat16 or float16. Features that the weights
            store beyond x's count as zeros.
        trellis: int16, the shards' matrices one after another, strip-major.
        suh: float16 `[shards, stored k]`.
        svh: float16 `[sum of the shards' stored n]`.
        bias: `[sum of keep]` of x's dtype, or None.
        shards: Five numbers for each: stored n, skip, keep, words, codebook. Columns
            skip to skip + keep of a shard are wanted, the others are not.
        exact: Whether the weights must have exactly the format's fp16 values. The fast
            kernels round less in places and more in others; docs/design/cpu-kernels.md
            has the errors. On CUDA they have, unless a plan of `set_plans` says
            otherwise.
        batch_invariant: Whether a row's result must be the same, bit for bit, for any
            number of rows. On the CPU it always is.
        workspace: On CUDA, which workspace to use (`exl3.workspace`).

    Returns:
        `[..., sum of keep]` of x's dtype.
    """
    return torch.ops.exl3.linear(
        x, trellis, suh, svh, bias, shards, exact, batch_invariant, workspace
    )


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    experts: Tensor,
    suh13: Tensor,
    svh13: Tensor,
    suh2: Tensor,
    svh2: Tensor,
    slices: int,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    limit: float = float("inf"),
    exact: bool = False,
    batch_invariant: bool = False,
    workspace: int = 0,
) -> Tensor:
    """Runs the routed experts of one layer, whose bits may differ in every matrix.

    A local expert e has `slices` virtual experts, e * slices + j, which always run
    together and whose results are summed: the slices of a rank-sliced expert.

    Args:
        x: `[tokens, features]`, float32, bfloat16 or float16; features may be fewer
            than the stored hidden size, the rest counts as zeros.
        topk_ids: int32 or int64 `[tokens, top_k]`, routed experts; -1 is skipped.
        topk_weights: float32 `[tokens, top_k]`.
        w13: int16 slab of the gate and up matrices `[hidden, intermediate]`.
        w2: int16 slab of the down matrices `[intermediate, hidden]`.
        experts: int64 `[virtual experts, 3, 3]`: for gate, up and down the word offset
            in its slab, the words of a tile and the codebook.
        suh13: float16 `[virtual experts, 2, hidden]`, of gate and up.
        svh13: float16 `[virtual experts, 2, intermediate]`.
        suh2: float16 `[virtual experts, intermediate]`.
        svh2: float16 `[virtual experts, hidden]`.
        slices: Virtual experts of each local expert.
        expert_map: int32 `[routed experts]`, the local expert of each or -1 if another
            rank has it; None if all are local.
        activation: "silu": `silu(min(gate, limit)) * clamp(up, -limit, limit)`.
        limit: Infinity for no limit.
        exact: As in `linear`.
        batch_invariant: As in `linear`.
        workspace: As in `linear`.

    Returns:
        `[tokens, features]` of x's dtype: the weighted sums. A token's sum runs in
        float32 and in the order of its virtual experts, whatever the batch.
    """
    return torch.ops.exl3.moe(
        x,
        topk_ids,
        topk_weights,
        w13,
        w2,
        experts,
        suh13,
        svh13,
        suh2,
        svh2,
        slices,
        expert_map,
        activation,
        limit,
        exact,
        batch_invariant,
        workspace,
    )


def dequant(
    trellis: Tensor,
    suh: Tensor | None,
    svh: Tensor | None,
    k: int,
    n: int,
    words: int,
    codebook: int,
) -> Tensor:
    """Decodes a matrix.

    Args:
        trellis: int16, strip-major.
        suh: float16 `[k]`. None leaves the rows in the rotated domain.
        svh: float16 `[n]`. None leaves the columns in the rotated domain.
        k: Stored in-features.
        n: Stored out-features.
        words: int16 words of one tile.
        codebook: 0, 1 or 2.

    Returns:
        float32 `[k, n]`: the matrix that `linear` multiplies with; without suh and svh
        the decoded values alone.
    """
    return torch.ops.exl3.dequant(trellis, suh, svh, k, n, words, codebook)


def hadamard(
    x: Tensor, pre: Tensor | None = None, post: Tensor | None = None
) -> Tensor:
    """Rotates blocks of 128: `((x * pre) H / sqrt(128)) * post`, in float32 inside.

    Args:
        x: `[..., width]`, float32, bfloat16 or float16; width a multiple of 128.
        pre: float16 `[width]`, or None for ones.
        post: float16 `[width]`, or None for ones.

    Returns:
        As x.
    """
    return torch.ops.exl3.hadamard(x, pre, post)


def has_cuda() -> bool:
    """Whether the compiled ops have CUDA kernels."""
    return hasattr(torch.ops.exl3, "set_workspace")


def set_workspace(workspace: Tensor, index: int) -> None:
    """Gives `linear` and `moe` memory to work in; see `exl3.workspace`.

    Args:
        workspace: uint8 `[bytes]` on a GPU. It is kept until another takes its place.
        index: What calls name it by, 0 to 7.
    """
    _need_cuda("set_workspace")
    torch.ops.exl3.set_workspace(workspace, index)


def linear_workspace(
    rows: int, k: int, shards: Sequence[int], architecture: int, multiprocessors: int
) -> int:
    """Bytes of workspace that `linear` needs on a GPU.

    Args:
        rows: Of x, at most.
        k: Stored in-features.
        shards: As `linear` takes them.
        architecture: Of the GPU: 90 for 9.0.
        multiprocessors: Of the GPU.
    """
    _need_cuda("linear_workspace")
    return torch.ops.exl3.linear_workspace(
        rows, k, shards, architecture, multiprocessors
    )


def moe_workspace(
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    virtual_experts: int,
    slices: int,
    multiprocessors: int,
) -> int:
    """Bytes of workspace that `moe` needs on a GPU.

    Args:
        tokens: At most.
        top_k: Routed experts of a token.
        hidden: As stored.
        intermediate: As stored, of one slice.
        virtual_experts: Of this rank.
        slices: As `moe` takes them.
        multiprocessors: Of the GPU.
    """
    _need_cuda("moe_workspace")
    return torch.ops.exl3.moe_workspace(
        tokens, top_k, hidden, intermediate, virtual_experts, slices, multiprocessors
    )


def linear_plan(
    rows: int,
    k: int,
    shards: Sequence[int],
    architecture: int,
    multiprocessors: int,
    exact: bool = False,
    batch_invariant: bool = False,
) -> list[int]:
    """How `linear` cuts its work on a GPU.

    Args:
        rows: Of x.
        k: Stored in-features.
        shards: As `linear` takes them.
        architecture: Of the GPU: 90 for 9.0.
        multiprocessors: Of the GPU.
        exact: As `linear` takes it.
        batch_invariant: As `linear` takes it.

    Returns:
        Rows of a block, splits of k, and whether weights are unrounded (0 or 1).
    """
    _need_cuda("linear_plan")
    return torch.ops.exl3.linear_plan(
        rows, k, shards, architecture, multiprocessors, exact, batch_invariant
    )


def set_plans(plans: Sequence[Plan]) -> None:
    """Gives `linear` measured plans, in place of those that were given before.

    Workspaces that were reserved before may be too small for them: so it comes first.

    Args:
        plans: No two for one call; `exl3.plans.read` reads them from a file.

    Raises:
        PlanError: There are two for one call.
    """
    _need_cuda("set_linear_plans")
    check_disjoint(plans)
    numbers: list[int] = []
    for plan in plans:
        architecture = int(plan.architecture.replace(".", ""))
        numbers += [architecture, plan.k, plan.n, *plan.rows]
        numbers += [plan.block_rows, plan.splits, plan.unrounded]
    torch.ops.exl3.set_linear_plans(numbers)


def _need_cuda(op: str) -> None:
    if not hasattr(torch.ops.exl3, op):
        raise RuntimeError(
            "exl3: the compiled ops have no CUDA kernels; "
            "build them with VLLM_TARGET_DEVICE=cuda"
        )


def encode_tiles(tiles: Tensor, words: int, codebook: int) -> tuple[Tensor, Tensor]:
    """Finds the trellis states whose values are nearest to each tile's weights.

    Args:
        tiles: Row-major 16 x 16 tiles, float32 `[num, 256]`; on the scale of the
            codebook, and finite.
        words: int16 words of a tile.
        codebook: 0, 1 or 2.

    Returns:
        The packed tiles, int16 `[num, words]`, and the weights that they decode to,
        float32 `[num, 256]`. Neither depends on the number of threads or the CPU.
    """
    return torch.ops.exl3.encode_tiles(tiles, words, codebook)


# What torch.compile knows of the ops: the results' shapes.


@library.register_fake("exl3::linear")
def _fake_linear(x, trellis, suh, svh, bias, shards, *_, **__):
    return x.new_empty([*x.shape[:-1], sum(shards[2::5])])


@library.register_fake("exl3::moe")
def _fake_moe(x, *_, **__):
    return x.new_empty(x.shape)


@library.register_fake("exl3::dequant")
def _fake_dequant(trellis, suh, svh, k, n, words, codebook):
    return trellis.new_empty([k, n], dtype=torch.float32)


@library.register_fake("exl3::hadamard")
def _fake_hadamard(x, pre, post):
    return x.new_empty(x.shape)


@library.register_fake("exl3::encode_tiles")
def _fake_encode_tiles(tiles, words, codebook):
    packed = tiles.new_empty([tiles.shape[0], words], dtype=torch.int16)
    return packed, tiles.new_empty(tiles.shape)
