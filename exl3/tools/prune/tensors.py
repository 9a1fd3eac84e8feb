# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What becomes of each tensor of a checkpoint when experts go."""

from collections.abc import Iterator
from dataclasses import dataclass

from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.plan import text_config
from exl3.format.names import SHARED_H, layer_of, parse_name
from exl3.tools.prune.allocation import Kept
from exl3.tools.prune.layers import Source


@dataclass(frozen=True)
class Move:
    """A tensor that stays.

    Attributes:
        header: As it is stored in the source.
        name: Its new name.
        rows: The rows that stay, of its first dimension; None for all.
    """

    header: TensorHeader
    name: str
    rows: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its new shape."""
        shape = self.header.shape
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes that it will take."""
        return self.header._replace(shape=self.shape).num_bytes


class Renumbering:
    """The new index of every expert: those that stay are counted anew, in their order.

    Args:
        source: The checkpoint.
        kept: The experts that stay.
    """

    def __init__(self, source: Source, kept: Kept):
        self._place = {
            f"{layer.name}.experts": {
                str(expert): at for at, expert in enumerate(kept[index])
            }
            for index, layer in source.layers.items()
        }

    def name(self, name: str) -> str | None:
        """A tensor's new name; None if it goes with its expert."""
        match = parse_name(name)
        place = self._place.get(match["experts"]) if match else None
        if match is None or place is None or match["expert"] == SHARED_H:
            return name
        at = place.get(match["expert"])
        start, end = match.span("expert")
        return None if at is None else f"{name[:start]}{at}{name[end:]}"


def moves(source: Source, kept: Kept) -> Iterator[Move]:
    """The tensors that stay, in the order in which they are stored."""
    renumbering = Renumbering(source, kept)
    for header in source.headers:
        part = source.parts.get(header.name)
        if part is None:
            yield Move(header, header.name)
        elif part.expert is None:
            whole = len(kept[part.layer]) == source.layers[part.layer].width
            yield Move(header, header.name, None if whole else kept[part.layer])
        elif (name := renumbering.name(header.name)) is not None:
            yield Move(header, name)


def shards(source: Source, kept: Kept, limit: int) -> list[list[Move]]:
    """The tensors that stay, layer by layer, in shards of about as many bytes.

    Args:
        source: The checkpoint.
        kept: The experts that stay.
        limit: Bytes that a shard has at most, unless one tensor has more.
    """
    num_layers = text_config(source.config)["num_hidden_layers"]

    def place(move: Move) -> tuple[int, str]:
        """Tensors of a layer together, and of these the ones of a file."""
        layer = layer_of(move.header.name, num_layers)
        return (-1 if layer is None else layer), move.header.file

    result: list[list[Move]] = [[]]
    size = 0
    for move in sorted(moves(source, kept), key=place):
        if result[-1] and size + move.num_bytes > limit:
            result.append([])
            size = 0
        result[-1].append(move)
        size += move.num_bytes
    return result
