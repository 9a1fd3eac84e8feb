# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Bytes of KV cache that a token takes on one GPU, told from the config.

With MLA every rank holds the same latent vectors. With grouped queries each rank holds
its heads of keys and values, and at least one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exl3.checkpoint.ranks import kv_heads

#: Bytes of an element, by what `--kv-cache-dtype` calls it.
ELEMENT_BYTES = {"bfloat16": 2, "fp8": 1}
#: A token's latent vector in fp8 where attention is sparse: 512 bytes, 4 scales in
#: float32, and the rotary part of 64 in bfloat16.
_SPARSE_FP8_BYTES = 656
#: The indexer's keys are fp8 with one float32 scale for each so many.
_INDEXER_BLOCK = 128


@dataclass(frozen=True)
class KvCache:
    """What a token takes, of the trunk's layers and the drafts'."""

    kind: str  # "MLA", "MLA with indexer" or "grouped queries"
    trunk: int  # bytes on one GPU
    draft: int


def kv_cache(
    text: Mapping[str, Any], num_layers: int, num_drafts: int, size: int, dtype: str
) -> KvCache | None:
    """The KV cache of a model, or None if its config does not tell.

    Args:
        text: The text model's config.
        num_layers: Decoder layers.
        num_drafts: Draft layers that are stored.
        size: Tensor-parallel ranks.
        dtype: "bfloat16" or "fp8".
    """
    rank = _count(text, "kv_lora_rank")
    element = ELEMENT_BYTES[dtype]
    if rank is None:
        heads, dim = kv_heads(text), _head_dim(text)
        if heads is None or dim is None:
            return None
        layer = 2 * max(1, heads // size) * dim * element
        return KvCache(
            "grouped queries",
            layer * _attention_layers(text, num_layers),
            layer * num_drafts,
        )
    rotary = _count(text, "qk_rope_head_dim") or 0
    layer = (rank + rotary) * element
    if _count(text, "index_topk") is None:
        return KvCache("MLA", layer * num_layers, layer * num_drafts)
    if dtype == "fp8":
        layer = _SPARSE_FP8_BYTES
    keys = _count(text, "index_head_dim") or _INDEXER_BLOCK
    keys += keys // _INDEXER_BLOCK * 4
    indexers = sum(has_indexer(text, at, num_layers) for at in range(num_layers))
    return KvCache(
        "MLA with indexer",
        layer * num_layers + keys * indexers,
        (layer + keys) * num_drafts,
    )


def has_indexer(text: Mapping[str, Any], layer: int, num_layers: int) -> bool:
    """Whether vLLM builds an indexer in a layer of a model with sparse attention.

    Other layers use what the layer before them chose.

    Args:
        text: The text model's config.
        layer: Its global index.
        num_layers: Decoder layers. Drafts have an indexer each.
    """
    if layer >= num_layers:
        return True
    pattern = text.get("index_topk_pattern")
    if isinstance(pattern, str | list):
        return not (layer < len(pattern) and pattern[layer] == "S")
    every = _count(text, "index_topk_freq") or 1
    offset = text.get("index_skip_topk_offset", 2)
    offset = offset if type(offset) is int else 2
    return max(layer - offset + 1, 0) % every == 0


def _attention_layers(text: Mapping[str, Any], num_layers: int) -> int:
    """Decoder layers that keep keys and values of every token."""
    types = text.get("layer_types")
    if isinstance(types, list) and len(types) == num_layers:
        return sum(kind != "linear_attention" for kind in types)
    every = _count(text, "full_attention_interval")
    return num_layers if every is None else num_layers // every


def _head_dim(text: Mapping[str, Any]) -> int | None:
    dim = _count(text, "head_dim")
    hidden, heads = _count(text, "hidden_size"), _count(text, "num_attention_heads")
    if dim is None and hidden is not None and heads is not None:
        return hidden // heads
    return dim


def _count(text: Mapping[str, Any], field: str) -> int | None:
    value = text.get(field)
    return value if type(value) is int and 0 < value < 2**32 else None
