# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The file that says which experts a pruned checkpoint kept. It is a profile, too."""

from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as brief  # a hostile value must not fill the screen
from typing import Any

from exl3.checkpoint.json_files import read_json
from exl3.tools.prune.allocation import Kept
from exl3.tools.prune.layers import RoutedLayer, Source
from exl3.tools.shared.errors import ToolError

RECORD_FILE = "pruned_experts.json"


def as_record(
    source: Source, kept: Kept, request: Mapping[str, Any], tokens: int
) -> dict[str, Any]:
    """What the file holds.

    Args:
        source: The checkpoint that was pruned.
        kept: The experts that stayed, by their indices in it.
        request: The options that decided.
        tokens: Tokens of text that the statistics come from.
    """
    return {
        "source": source.folder.resolve().name,
        "request": request,
        "tokens": tokens,
        "layers": {
            str(index): {"width": layer.width, "kept": list(kept[index])}
            for index, layer in source.layers.items()
        },
    }


def read_profile(file: Path, source: Source) -> Kept:
    """The experts to keep, as an earlier run recorded them or as a person wrote them.

    `{"layers": {"3": [0, 2, 5], "4": {"width": 8, "kept": [1, 2]}}}`; a layer that is
    left out keeps all of its experts.

    Raises:
        CheckpointError: It is no JSON file.
        ToolError: It does not fit the checkpoint, or its router.
    """
    content = read_json(file)
    profile = content.get("layers") if isinstance(content, Mapping) else None
    if not isinstance(profile, Mapping):
        raise ToolError(
            f'{file}: has no "layers", an object from layer index to the experts that '
            "stay"
        )
    unknown = profile.keys() - {str(index) for index in source.layers}
    if unknown:
        raise ToolError(
            f"{file}: layer {brief(min(unknown))} has no routed experts in "
            f"{source.folder}; they are in the layers {list(source.layers)}"
        )
    kept: Kept = {}
    for index, layer in source.layers.items():
        entry = profile.get(str(index), list(range(layer.width)))
        width = layer.width
        if isinstance(entry, Mapping):
            width = entry.get("width", width)
            entry = entry.get("kept")
        if width != layer.width:
            raise ToolError(
                f"{file}: is of a checkpoint whose layer {index} has {brief(width)} "
                f"routed experts, and {source.folder} has {layer.width}; use the "
                "profile of this checkpoint"
            )
        kept[index] = _experts(entry, layer, f"{file}: layer {index}")
    return kept


def _experts(entry: Any, layer: RoutedLayer, where: str) -> tuple[int, ...]:
    width, routing = layer.width, layer.routing
    if (
        not isinstance(entry, list)
        or any(type(at) is not int or not 0 <= at < width for at in entry)
        or len(set(entry)) != len(entry)
    ):
        raise ToolError(
            f"{where} keeps {brief(entry)}; expected a list of different experts from "
            f"0 to {width - 1}"
        )
    if len(entry) < routing.least_width:
        raise ToolError(
            f"{where} keeps {len(entry)} experts; its router needs at least "
            f"{routing.least_width}"
        )
    size = width // routing.groups
    groups = [
        sum(at // size == group for at in entry) for group in range(routing.groups)
    ]
    if len(set(groups)) > 1:
        raise ToolError(
            f"{where} keeps {groups} experts of its {routing.groups} groups "
            f"(n_group); keep as many of each, since groups are told by position"
        )
    return tuple(sorted(entry))
