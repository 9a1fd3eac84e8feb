# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a checkpoint's tensors say of the number of routed experts of each layer."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.modules import group_by_module
from exl3.format.names import STACKS

# The experts end where their index does: `experts.0.` may be followed by any field.
# Indices have few digits, since a name may be hostile.
_MOE_MODULE = re.compile(
    r"(?:^|\.)(?P<mtp>mtp\.)?layers\.(?P<layer>[0-9]{1,6})\.(?:[a-z_]+\.)*?mlp\."
    r"(?:(?P<gate>gate)$|experts(?:$|\.(?P<expert>[0-9]{1,6})(?:\.|$)"
    r"|\.(?P<stack>gate_up_proj|down_proj)$))"
)


@dataclass(frozen=True)
class StoredWidths:
    """What the checkpoint's headers say, by global layer index."""

    gates: Mapping[int, TensorHeader]
    biases: Mapping[int, TensorHeader]
    experts: Mapping[int, frozenset[int]]  # expert ids that have a tensor
    stacks: tuple[tuple[int, TensorHeader], ...]  # all experts in one tensor
    num_mtp: int = 0  # draft layers under names of their own: `mtp.layers.0`


def read_stored(headers: Iterable[TensorHeader], num_layers: int) -> StoredWidths:
    """Collects gates, correction biases and expert ids from tensor headers.

    Args:
        headers: Every tensor of the checkpoint.
        num_layers: Decoder layers, to place `mtp.layers.0` after them.
    """
    return widths_of_modules(group_by_module(headers), num_layers)


def widths_of_modules(
    modules: Mapping[str, Mapping[str, TensorHeader]], num_layers: int
) -> StoredWidths:
    """The same from tensors that are grouped by their modules."""
    gates: dict[int, TensorHeader] = {}
    biases: dict[int, TensorHeader] = {}
    trellises: dict[int, TensorHeader] = {}
    experts: dict[int, set[int]] = {}
    stacks: list[tuple[int, TensorHeader]] = []
    mtp: set[str] = set()
    for module, fields in modules.items():
        match = _MOE_MODULE.search(module)
        if match is None:
            continue
        layer = int(match["layer"])
        if match["mtp"]:
            mtp.add(match["layer"])
            layer += num_layers
        if match["expert"]:
            experts.setdefault(layer, set()).add(int(match["expert"]))
            continue
        if match["gate"]:
            for name, of in (
                ("weight", gates),
                ("e_score_correction_bias", biases),
                ("trellis", trellises),
            ):
                if name in fields:
                    of[layer] = fields[name]
            continue
        names = ("weight",) if match["stack"] else STACKS
        stacks += [(layer, fields[name]) for name in names if name in fields]
    for layer, trellis in trellises.items():
        gates.setdefault(
            layer, _gate_of(trellis, biases.get(layer), experts.get(layer))
        )
    frozen = {layer: frozenset(ids) for layer, ids in experts.items()}
    return StoredWidths(gates, biases, frozen, tuple(stacks), len(mtp))


def _gate_of(
    trellis: TensorHeader, bias: TensorHeader | None, experts: set[int] | None
) -> TensorHeader:
    """What stands for a gate that is stored as EXL3.

    Its stored rows are filled up to a multiple of 128, so its router's bias, or else
    the experts themselves, tell how many there are.
    """
    if bias is not None and len(bias.shape) == 1:
        return bias._replace(shape=(*bias.shape, 0))
    return trellis._replace(shape=(len(experts or ()), 0))
