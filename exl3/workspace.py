# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Memory that the CUDA ops work in, held from loading on.

The ops allocate nothing but their results, so that they can be captured in CUDA graphs
and the memory that they need is known before the KV cache takes the rest. Whoever owns
layers asks, while loading, for the largest need among them:

    size = workspace.linear_bytes(max_rows, k, shards, device)
    workspace.reserve(device, size)

Ops that use one workspace must run one after another. Those that may overlap, on two
streams, name two: shared experts beside routed ones, a draft beside its target.
On the CPU there is nothing to ask for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from exl3 import ops

_reserved: dict[tuple[torch.device, int], Tensor] = {}


def linear_bytes(rows: int, k: int, shards: Sequence[int], device: torch.device) -> int:
    """What `ops.linear` needs.

    Args:
        rows: Of x, at most.
        k: Stored in-features.
        shards: As the op takes them.
        device: Where it runs.
    """
    if not _is_needed(device):
        return 0
    return ops.linear_workspace(rows, k, shards, _multiprocessors(device))


def moe_bytes(
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    virtual_experts: int,
    slices: int,
    device: torch.device,
) -> int:
    """What `ops.moe` needs.

    Args:
        tokens: At most.
        top_k: Routed experts of a token.
        hidden: As stored.
        intermediate: As stored, of one slice.
        virtual_experts: Of this rank.
        slices: As the op takes them.
        device: Where it runs.
    """
    if not _is_needed(device):
        return 0
    return ops.moe_workspace(
        tokens,
        top_k,
        hidden,
        intermediate,
        virtual_experts,
        slices,
        _multiprocessors(device),
    )


def reserve(device: torch.device, size: int, index: int = 0) -> None:
    """Makes a workspace at least so large, before any graph with it is captured.

    Args:
        device: Where it is.
        size: In bytes.
        index: Which one, 0 to 7.
    """
    if not _is_needed(device):
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    current = _reserved.get((device, index))
    if current is None or current.numel() < size:
        replacement = torch.empty(size, dtype=torch.uint8, device=device)
        ops.set_workspace(replacement, index)
        _reserved[device, index] = replacement


def _is_needed(device: torch.device) -> bool:
    return device.type == "cuda"


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
