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

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from exl3 import ops, plans

#: Each begins with the number of clamped values, int64 (csrc/exl3/launch/workspace.h).
_CLAMPED_BYTES = 8

_reserved: dict[tuple[torch.device, int], Tensor] = {}


def linear_bytes(rows: int, k: int, shards: Sequence[int], device: torch.device) -> int:
    """What `ops.linear` needs.

    Args:
        rows: Of x, at most.
        k: Stored in-features.
        shards: As the op takes them.
        device: Where it runs.

    Raises:
        PlanError: The file that EXL3_CUDA_PLANS names cannot be used.
    """
    if not _is_needed(device):
        return 0
    _use_measured_plans()
    return ops.linear_workspace(rows, k, shards, *gpu(device))


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
        gpu(device)[1],
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
    device = _with_index(device)
    current = _reserved.get((device, index))
    if current is None or current.numel() < size:
        replacement = torch.empty(size, dtype=torch.uint8, device=device)
        ops.set_workspace(replacement, index)
        _reserved[device, index] = replacement


def clamped(device: torch.device, index: int = 0) -> int:
    """How many values the ops clamped to fp16's range since this workspace was given.

    Activations are fp16 between their transform and the product. bfloat16 inputs that
    are larger than that become 65504; results are then wrong, but finite. Values are
    counted once for each matrix that takes them. This waits for the GPU.

    Args:
        device: Where the workspace is.
        index: Which one, 0 to 7.
    """
    workspace = _reserved.get((_with_index(device), index))
    if workspace is None:
        return 0
    return int(workspace[:_CLAMPED_BYTES].view(torch.int64).item())


def gpu(device: torch.device) -> tuple[int, int]:
    """A GPU's architecture (90 for 9.0) and its number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    architecture = 10 * properties.major + properties.minor
    return architecture, properties.multi_processor_count


@cache
def _use_measured_plans() -> None:
    """Before the first need is known, since it depends on plans."""
    if path := os.environ.get(plans.VARIABLE):
        ops.set_plans(plans.read(Path(path)))


def _is_needed(device: torch.device) -> bool:
    return device.type == "cuda"


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
