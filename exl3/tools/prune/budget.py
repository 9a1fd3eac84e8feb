# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""From what a user asks for to the experts that each layer keeps."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exl3.tools.prune.allocation import Kept, Scores, allocate, best
from exl3.tools.prune.layers import RoutedLayer, Source
from exl3.tools.shared.errors import ToolError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Budget:
    """What the layers of one kind, trunk or draft, may keep.

    Attributes:
        option: The command's option, for a refusal.
        keep_ratio: The share of their experts.
        target_bytes: Or the bytes of all tensors of the checkpoint.
        widths: Or the width of each layer in order; of all of them, if it is one.
        floor: The least width of a layer; None for half of the mean that the budget
            leaves.
    """

    option: str
    keep_ratio: float | None = None
    target_bytes: int | None = None
    widths: tuple[int, ...] | None = None
    floor: int | None = None

    def share(
        self, source: Source, layers: Sequence[RoutedLayer], scores: Scores, rest: Kept
    ) -> Kept:
        """The experts that stay.

        Args:
            source: The checkpoint.
            layers: The layers that share the budget.
            scores: What each expert is worth, comparable between layers.
            rest: What the other layers keep.

        Raises:
            ToolError: The budget cannot be kept, or leaves a router too few experts.
        """
        if self.widths is not None:
            return self._by_widths(layers, scores)
        if self.keep_ratio is not None:
            costs = {layer.index: (1,) * layer.width for layer in layers}
            unit, asked = "experts", self.keep_ratio
            scale = max(sum(layer.width for layer in layers), 1)
            fixed = 0
        else:
            assert self.target_bytes is not None
            costs = {layer.index: layer.expert_bytes for layer in layers}
            unit, asked = "bytes of experts", self.target_bytes
            scale = 1
            none: Kept = {layer.index: () for layer in layers}
            fixed = source.num_bytes({**rest, **none})
        capacity = round(asked * scale) - fixed
        floors = self._floors(layers, costs, capacity)
        needed = sum(
            costs[layer.index][expert]
            for layer in layers
            for expert in best(layer, scores[layer.index], floors[layer.index])
        )
        if needed > capacity:
            least = {at.index: at.routing.least_width for at in layers}
            floor = self.floor if floors != least else None
            what = "the routers need" if floor is None else f"--floor {floor} keeps"
            raise ToolError(
                f"{self.option}: {asked} leaves {max(capacity, 0)} {unit}, and {what} "
                f"{needed} ({min(floors.values())} or more in each of {len(layers)} "
                f"layers); give at least {(needed + fixed) / scale:.10g}"
                + ("" if floor is None else ", or a lower floor")
            )
        return allocate(layers, scores, costs, capacity, floors)

    def _by_widths(self, layers: Sequence[RoutedLayer], scores: Scores) -> Kept:
        assert self.widths is not None
        widths = self.widths
        if len(widths) == 1:
            widths *= len(layers)
        if len(widths) != len(layers):
            raise ToolError(
                f"{self.option}: has {len(widths)} widths, and {len(layers)} layers "
                f"have routed experts ({[layer.index for layer in layers]}); give one "
                "for each of these, or one for all"
            )
        for layer, width in zip(layers, widths):
            routing = layer.routing
            if (
                not routing.least_width <= width <= layer.width
                or width % routing.groups
            ):
                of = f", in multiples of {routing.groups}" if routing.groups > 1 else ""
                raise ToolError(
                    f"{self.option}: gives layer {layer.index} a width of {width}; it "
                    f"has {layer.width} routed experts, and its router needs at least "
                    f"{routing.least_width}{of}"
                )
        return {
            layer.index: best(layer, scores[layer.index], width)
            for layer, width in zip(layers, widths)
        }

    def _floors(
        self,
        layers: Sequence[RoutedLayer],
        costs: Mapping[int, Sequence[int]],
        capacity: int,
    ) -> dict[int, int]:
        """The least width of each layer, at least what its router needs."""
        share = capacity / max(sum(map(sum, costs.values())), 1)
        floors = {}
        for layer in layers:
            routing = layer.routing
            if self.floor is None:
                whole = int(share * layer.width / 2 / routing.groups) * routing.groups
            else:
                whole = -(-self.floor // routing.groups) * routing.groups
            floors[layer.index] = min(max(whole, routing.least_width), layer.width)
        return floors


def parse_size(text: str) -> int:
    """Bytes from `1500000000`, `1.5GB`, `800MB` or `12GiB`.

    Raises:
        ValueError: It is no size.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMGT]?)(i?)B?", text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no size; expected one like 1.5GB or 12GiB")
    units = _BINARY_UNITS if match[3] else _UNITS
    return int(float(match[1]) * units[match[2]])
