# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The files beside the tensors, for a checkpoint whose experts have gone."""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from exl3.checkpoint.expert_widths import (
    PER_LAYER_FIELD,
    PER_LAYER_FIELDS,
    SCALAR_FIELDS,
)
from exl3.checkpoint.json_files import read_json
from exl3.checkpoint.metadata import QUANTIZATION_FILE, add_files, read_metadata
from exl3.checkpoint.plan import text_config
from exl3.format.tail import TAIL
from exl3.tools.prune.allocation import Kept
from exl3.tools.prune.layers import Source
from exl3.tools.prune.tensors import Move, Renumbering

#: The tail in `quantization_config.json`.
_TAIL_AGAIN = "rank_sliced"
#: Says the same as the tail's own width, where that is one number.
_TAIL_WIDTH_AGAIN = "tr3_tail_per_layer"


def pruned_config(source: Source, kept: Kept) -> dict[str, Any]:
    """`config.json` of the pruned checkpoint.

    The widths are in `n_routed_experts_per_layer`, by global layer index with 0 for
    dense layers, if layers differ, and in no other spelling. The model-wide count is
    the widest layer's.
    """
    config = deepcopy(dict(source.config))
    text = config["text_config"] if text_config(config) is not config else config
    widths = _widths(source, kept)
    for field in PER_LAYER_FIELDS:
        *outer, last = field.split(".")
        for of in (config, text):
            holder = of.get(outer[0]) if outer else of
            if isinstance(holder, dict) and (not outer or outer[0] != TAIL):
                holder.pop(last, None)
    counts = [field for field in SCALAR_FIELDS if field in text] or SCALAR_FIELDS[:1]
    for field in counts:
        text[field] = max(widths)
    if len(set(widths) - {0}) > 1:
        text[PER_LAYER_FIELD] = widths
    for of in (config, text):
        if isinstance(of.get(TAIL), dict):
            _prune_tail(of[TAIL], widths)
    return config


def _widths(source: Source, kept: Kept) -> list[int]:
    return [len(kept.get(layer, ())) for layer in range(source.num_layers)]


def _prune_tail(tail: dict[str, Any], widths: list[int]) -> None:
    last = tail["moe_layers"][1]
    stated = widths[: last + 1]
    tail["experts_per_layer"] = stated + [0] * (last + 1 - len(stated))
    tail.pop(_TAIL_WIDTH_AGAIN, None)


def other_files(
    source: Source, kept: Kept, tensors: Iterable[Move]
) -> Iterator[tuple[str, Any]]:
    """The other JSON files of an EXL3 checkpoint that say something of its experts.

    Args:
        source: The checkpoint.
        kept: The experts that stay.
        tensors: The tensors that stay.

    Yields:
        Each file's name and its new content.
    """
    if not source.is_exl3:
        return
    metadata = read_metadata(source.folder, source.config)
    add_files(metadata, source.folder)
    if metadata.tail is not None and metadata.tail.bits_file is not None:
        yield metadata.tail.bits_file, _pruned_bits(source, kept, metadata.bits_map)
    file = source.folder / QUANTIZATION_FILE
    if file.exists():
        content = dict(read_json(file))
        if isinstance(content.get("tensor_storage"), dict):
            content["tensor_storage"] = _pruned_storage(
                content["tensor_storage"], Renumbering(source, kept), tensors
            )
        if isinstance(content.get(_TAIL_AGAIN), dict):
            _prune_tail(content[_TAIL_AGAIN], _widths(source, kept))
        yield file.name, content


def _pruned_bits(
    source: Source, kept: Kept, bits_map: Mapping[str, Any]
) -> dict[str, Any]:
    """The bits of each expert: every list that has an entry for each is pruned."""
    pruned = dict(bits_map)
    for index, layer in source.layers.items():
        entry = bits_map.get(str(index))
        if isinstance(entry, Mapping):
            pruned[str(index)] = {
                field: [value[expert] for expert in kept[index]]
                if isinstance(value, list) and len(value) == layer.width
                else value
                for field, value in entry.items()
            }
    return pruned


def _pruned_storage(
    storage: Mapping[str, Any], renumbering: Renumbering, tensors: Iterable[Move]
) -> dict[str, Any]:
    """`tensor_storage`: modules and tensors by their new names, in their new shapes."""
    cut = {move.name: move for move in tensors if move.rows is not None}
    pruned = {}
    for module, entry in storage.items():
        weight = renumbering.name(f"{module}.weight")
        if weight is None:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("stored_tensors"), dict):
            stored = {}
            for name, about in entry["stored_tensors"].items():
                name = renumbering.name(name)
                if name in cut and isinstance(about, dict):
                    size = {
                        "shape": list(cut[name].shape),
                        "n_bytes": cut[name].num_bytes,
                    }
                    about = about | size
                if name is not None:
                    stored[name] = about
            entry = entry | {"stored_tensors": stored}
        pruned[weight.removesuffix(".weight")] = entry
    return pruned
