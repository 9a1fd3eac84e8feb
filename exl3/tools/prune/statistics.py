# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a text says of a model's routed experts, and what they are worth by it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as brief  # a hostile value must not fill the screen
from typing import Any

from exl3.checkpoint.json_files import read_json
from exl3.tools.prune.layers import RoutedLayer
from exl3.tools.shared.errors import ToolError

#: Marks a file of statistics, and its form.
FORMAT = "exl3-router-statistics-1"


@dataclass(frozen=True)
class LayerStatistics:
    """What a text says of the routed experts of one layer.

    Attributes:
        tokens: Tokens that were read.
        chosen: How many of them went to each expert.
        added: Sum over these of the router's weight times the L2 norm of the expert's
            output: how much the expert adds to the residual stream.
        stream: Mean L2 norm of the residual stream behind the layer.
    """

    tokens: int
    chosen: tuple[int, ...]
    added: tuple[float, ...]
    stream: float

    @classmethod
    def parse(cls, value: Any, layer: RoutedLayer, where: str) -> "LayerStatistics":
        """Reads what `plain` wrote.

        Args:
            value: As parsed from JSON.
            layer: The layer that it is of.
            where: The file, for a refusal.

        Raises:
            ToolError: It is malformed, or of another layer.
        """
        value = value if isinstance(value, Mapping) else {}
        names = ("tokens", "chosen", "added", "stream")
        tokens, chosen, added, stream = map(value.get, names)
        if not (
            type(tokens) is int
            and tokens > 0
            and _numbers(chosen, layer.width, int)
            and _numbers(added, layer.width, int, float)
            and _numbers([stream], 1, int, float)
            and stream
        ):
            raise ToolError(
                f"{where}: layer {layer.index} has {brief(value)}; expected tokens, "
                f"stream, and chosen and added with a number for each of {layer.width} "
                "experts; gather the statistics of this checkpoint"
            )
        return cls(tokens, tuple(chosen), tuple(added), stream)

    def plain(self) -> dict[str, Any]:
        """The same as JSON."""
        return asdict(self)


def _numbers(value: Any, length: int, *types: type) -> bool:
    return (
        isinstance(value, list)
        and len(value) == length
        and all(type(at) in types and 0 <= at < math.inf for at in value)
    )


def reap(layer: LayerStatistics) -> list[float]:
    """Mean over an expert's tokens of router weight times norm of its output.

    Router-weighted expert activation pruning, https://arxiv.org/abs/2510.13999. Later
    layers add more to a stream that has grown, so it is a share of the stream's own
    norm. Within a layer that changes no order, and layers become comparable.
    """
    return [
        added / chosen / layer.stream if chosen else 0.0
        for added, chosen in zip(layer.added, layer.chosen)
    ]


def frequency(layer: LayerStatistics) -> list[float]:
    """The share of tokens that go to an expert."""
    return [chosen / layer.tokens for chosen in layer.chosen]


SALIENCIES = {"reap": reap, "frequency": frequency}


def read_statistics(
    file: Path, layers: Sequence[RoutedLayer]
) -> dict[int, LayerStatistics]:
    """Reads a file that `write_statistics` wrote.

    Args:
        file: The file.
        layers: The layers to read of. A draft layer may be missing.

    Raises:
        CheckpointError: It is no JSON file.
        ToolError: It is malformed, or of another checkpoint.
    """
    content = read_json(file)
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ToolError(
            f"{file}: is no file of router statistics ({FORMAT}); write one with "
            "--save-statistics"
        )
    found = content.get("layers")
    if not isinstance(found, Mapping):
        raise ToolError(f"{file}: layers is {brief(found)}; expected an object")
    statistics = {}
    for layer in layers:
        value = found.get(str(layer.index))
        if value is None and layer.is_draft:
            continue
        statistics[layer.index] = LayerStatistics.parse(value, layer, str(file))
    return statistics


def as_json(statistics: Mapping[int, LayerStatistics]) -> dict[str, Any]:
    """What a file of statistics holds."""
    layers = {str(index): layer.plain() for index, layer in statistics.items()}
    return {"format": FORMAT, "layers": layers}
