# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Bytes that the CUDA kernels work in, without torch or a GPU.

The kernels lay their workspace out themselves (csrc/exl3/launch); what is said here is
held to what they say by tests/kernels/test_workspace_bytes.py. The names are theirs.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from exl3.checkpoint.agreement import decoder_layers
from exl3.checkpoint.modules import FUSED
from exl3.checkpoint.plan import CheckpointPlan, text_config
from exl3.checkpoint.ranks import (
    Cut,
    blocks_around,
    cut_of,
    expert_part,
    kv_heads,
    most_parts,
)
from exl3.format.constants import HADAMARD
from exl3.format.names import layer_of
from exl3.tools.inspect.weights import DECODED

#: Rows of one launch; more of them are computed in several.
ROWS_AT_ONCE, TOKENS_AT_ONCE = 2048, 1024
_COUNTERS = 16 * 1024
_HEAD = 256 + _COUNTERS  # and what is counted
_SHORTEST = 512  # of k, below which a product is not split
_MOST_SPLITS = 8


def workspace_bytes(
    plan: CheckpointPlan, config: Mapping[str, Any], size: int, multiprocessors: int
) -> int:
    """What the layers of a rank reserve together, the draft's included.

    Layers that run one after another share a workspace; shared experts, which run
    beside routed ones, have one of their own, and a draft has both anew.

    Args:
        plan: The checkpoint's plan.
        config: Its `config.json`.
        size: A tensor-parallel size that fits it.
        multiprocessors: Of one GPU.
    """
    text = text_config(config)
    num_layers = decoder_layers(text)
    top_k = text.get("num_experts_per_tok")
    top_k = top_k if type(top_k) is int and 0 < top_k < 1024 else 1
    most: dict[tuple[bool, bool], int] = {}

    def need(module: str, num_bytes: int) -> None:
        layer = layer_of(module, num_layers)
        is_draft = layer is not None and layer >= num_layers
        key = is_draft, ".shared_expert" in module
        most[key] = max(most.get(key, 0), num_bytes)

    heads = kv_heads(text)
    for modules in _fused(plan.linears):
        first = modules[0]
        if first.rpartition(".")[2] in DECODED:
            continue
        k, columns = plan.linears[first].in_features, 0
        if cut_of(first) is Cut.ROWS:
            k = _most_held(k, size)
        for module in modules:
            parts = size if cut_of(module) in (Cut.COLUMNS, Cut.VOCABULARY) else 1
            parts = min(parts, most_parts(module, heads))
            columns += _most_held(plan.linears[module].out_features, parts)
        need(first, linear_bytes(k, columns, len(modules), multiprocessors))
    for name, layer in plan.experts.items():
        part = expert_part(layer, name, size, 0)
        sizes = layer.hidden, part.intermediate, layer.width, len(part.slices)
        need(name, moe_bytes(top_k, *sizes, multiprocessors))
    return sum(most.values())


def _most_held(features: int, size: int) -> int:
    """Features of the whole blocks that the fullest of so many ranks holds."""
    parts = [
        blocks_around(features * rank // size, features * (rank + 1) // size, features)
        for rank in range(size)
    ]
    return max(part.stop - part.start for part in parts)


def _fused(linears: Iterable[str]) -> Iterator[list[str]]:
    """Modules by the op that runs them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for module in linears:
        parent, _, name = module.rpartition(".")
        group = next((group[0] for group in FUSED if name in group), name)
        groups.setdefault((parent, group), []).append(module)
    yield from groups.values()


@lru_cache(maxsize=4096)
def linear_bytes(k: int, columns: int, shards: int, multiprocessors: int) -> int:
    """What one linear op needs, for any number of rows.

    Args:
        k: In-features, as stored.
        columns: Out-features of all its shards, as stored.
        shards: Matrices side by side.
        multiprocessors: Of the GPU.
    """
    # Between these, the plan is the same, and more rows need more.
    edges = [16, 32, 48, 64, *range(128, ROWS_AT_ONCE + 1, 128)]
    most = 0
    for rows in edges:
        block = next((size for size in (16, 32, 48, 64) if rows <= size), 128)
        row_blocks, column_blocks = -(-rows // block), columns // HADAMARD
        tiles = row_blocks * column_blocks
        splits = _splits(tiles, k, multiprocessors)
        parts = 4 * splits * tiles * block * HADAMARD if splits > 1 else 0
        most = max(most, shards * rows * k * 2 + parts)
    return _HEAD + most


@lru_cache(maxsize=4096)
def moe_bytes(
    top_k: int,
    hidden: int,
    intermediate: int,
    experts: int,
    slices: int,
    multiprocessors: int,
) -> int:
    """What the op of routed experts needs, for any number of tokens.

    Args:
        top_k: Routed experts of a token.
        hidden: As stored.
        intermediate: As stored, of one slice.
        experts: Of this rank.
        slices: Virtual experts of each.
        multiprocessors: Of the GPU.
    """
    most = 0
    for tokens in range(1, TOKENS_AT_ONCE + 1):
        pairs = tokens * top_k
        rows = pairs // max(1, experts)
        block = 64 if rows > 32 else 32 if rows > 12 else 16
        tiles = pairs // block + min(pairs, experts)
        parts = 0
        for count, columns, k in ((2, intermediate, hidden), (1, hidden, intermediate)):
            blocks = slices * tiles * (columns // HADAMARD)
            splits = _splits(blocks, k, multiprocessors)
            if splits > 1:
                parts = max(parts, block * HADAMARD * count * splits * blocks)
        sizes = (
            4 * experts,
            8,
            16 * tiles,
            *(4 * pairs,) * 3,
            2 * 2 * slices * pairs * hidden,
            2 * slices * pairs * intermediate,
            4 * slices * pairs * hidden,
            4 * parts,
        )
        most = max(most, sum(-(-part // 256) * 256 for part in sizes))
    return _HEAD + most


def _splits(blocks: int, k: int, multiprocessors: int) -> int:
    """Parts of k that a product is computed in, to keep the GPU busy."""
    splits = 1
    while (
        splits < _MOST_SPLITS
        and blocks * splits < 2 * multiprocessors
        and k // (2 * splits) >= _SHORTEST
        and 4 * blocks <= _COUNTERS
    ):
        splits *= 2
    return splits
