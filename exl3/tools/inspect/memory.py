# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What serving takes of each GPU's memory, and how long a KV cache the rest holds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exl3.checkpoint.agreement import decoder_layers
from exl3.checkpoint.plan import Survey, text_config
from exl3.tools.inspect.kv_cache import ELEMENT_BYTES, KvCache, kv_cache
from exl3.tools.inspect.weights import RankWeights
from exl3.tools.inspect.workspace import workspace_bytes

GIB = 2**30
#: What is assumed of the server and the GPU, since a checkpoint does not tell.
UTILIZATION = 0.92  # vLLM's default of --gpu-memory-utilization
ALLOWANCE = 3 * GIB  # activations, the CUDA context, NCCL and CUDA graphs
MULTIPROCESSORS = 188  # of an RTX PRO 6000; the workspace of others hardly differs
#: Tokens of a block of KV cache.
_BLOCK = 64


@dataclass(frozen=True)
class Memory:
    """The memory of one GPU at one tensor-parallel size, in bytes."""

    size: int  # tensor-parallel ranks
    weights: int  # without the draft's
    draft: int
    workspace: int
    kv_bytes: Mapping[str, int]  # of one token, by dtype; empty if not told
    kv_kind: str | None
    kv_tokens: Mapping[str, int]  # that fit, by dtype; empty without a GPU's memory
    fits: bool = True  # what is not KV cache, as far as the GPU's memory is known

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.draft + self.workspace + ALLOWANCE


def memory_by_size(
    found: Survey,
    config: Mapping[str, Any],
    sizes: Iterable[int],
    num_drafts: int,
    gpu_bytes: int | None,
) -> list[Memory]:
    """What each tensor-parallel size takes.

    Args:
        found: What is stored.
        config: Its `config.json`.
        sizes: Sizes that fit the checkpoint.
        num_drafts: Draft layers that are stored.
        gpu_bytes: Memory of one GPU, or None.
    """
    text = text_config(config)
    num_layers, weights = decoder_layers(text), RankWeights(found, config)
    result = []
    for size in sizes:
        held = weights.on(size)
        plan = found.checkpoint.plan
        workspace = workspace_bytes(plan, config, size, MULTIPROCESSORS)
        caches: dict[str, KvCache] = {}
        for dtype in ELEMENT_BYTES:
            cache = kv_cache(text, num_layers, num_drafts, size, dtype)
            if cache is not None:
                caches[dtype] = cache
        kv_bytes = {dtype: it.trunk + it.draft for dtype, it in caches.items()}
        kind = next((cache.kind for cache in caches.values()), None)
        memory = Memory(
            size, held.trunk, held.draft, workspace, kv_bytes, kind, kv_tokens={}
        )
        if gpu_bytes is not None:
            rest = int(gpu_bytes * UTILIZATION) - memory.fixed
            tokens = {
                dtype: max(0, rest // num_bytes // _BLOCK * _BLOCK)
                for dtype, num_bytes in kv_bytes.items()
                if num_bytes
            }
            memory = replace(memory, kv_tokens=tokens, fits=rest > 0)
        result.append(memory)
    return result


def assumptions(gpu_bytes: int | None) -> list[str]:
    """What the figures take for granted, one line each."""
    fullest = (
        "the figures are of the GPU that holds most, with the MTP layer where one is "
        "stored and its embedding and head shared with the model's"
    )
    lines = [fullest]
    lines.append(f"the workspace is of a GPU with {MULTIPROCESSORS} multiprocessors")
    if gpu_bytes is not None:
        lines.append(
            f"of {gpu_bytes / GIB:g} GiB vLLM takes {UTILIZATION:.0%} "
            f"(--gpu-memory-utilization), of which {ALLOWANCE / GIB:g} GiB are allowed "
            "for activations, the CUDA context, NCCL and CUDA graphs"
        )
    return lines
