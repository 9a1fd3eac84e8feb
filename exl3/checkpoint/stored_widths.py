# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a checkpoint's tensors say of the number of routed experts of each layer."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.layers import LayerPlan
from exl3.checkpoint.modules import group_by_module
from exl3.format.errors import CheckpointError
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


def check_parts(stored: StoredWidths) -> None:
    """The parts of a layer's router and experts must agree with each other.

    Raises:
        CheckpointError: Some do not; names both.
    """
    for layer, gate in stored.gates.items():
        if len(gate.shape) != 2:
            raise CheckpointError(
                f"{gate.file}: {gate.name} has shape {list(gate.shape)}, not "
                "[routed experts, hidden]"
            )
        bias = stored.biases.get(layer)
        if bias is not None and bias.shape != gate.shape[:1]:
            raise CheckpointError(
                f"{bias.name} has shape {list(bias.shape)} in {bias.file}, but "
                f"{gate.name} has shape {list(gate.shape)} in {gate.file}; "
                "prune both to the same experts"
            )
        ids = stored.experts.get(layer)
        width = gate.shape[0]
        # Nothing here grows with the width: a damaged header may claim any.
        if ids and (len(ids) != width or max(ids) != width - 1):
            missing = next(expert for expert in count() if expert not in ids)
            which = f"expert {missing} is missing"
            if missing >= width:
                extra = min(expert for expert in ids if expert >= width)
                which = f"expert {extra} has no row in the gate"
            raise CheckpointError(
                f"layer {layer}: {gate.name} in {gate.file} has {width} rows and the "
                f"checkpoint stores {len(ids)} routed experts: {which}; store experts "
                f"0 to {width - 1}"
            )
    for layer, stack in stored.stacks:
        gate_of = stored.gates.get(layer)
        if gate_of is not None and stack.shape[:1] != gate_of.shape[:1]:
            raise CheckpointError(
                f"{stack.name} has shape {list(stack.shape)} in {stack.file}, but "
                f"{gate_of.name} has shape {list(gate_of.shape)} in {gate_of.file}; "
                "prune both to the same experts"
            )


def check_layers(stored: StoredWidths, plan: LayerPlan) -> None:
    """Routers and experts must lie in layers that have them, each with the other.

    Args:
        stored: What the tensors say.
        plan: What the config says of the layers.

    Raises:
        CheckpointError: One lies in another layer, or a layer lacks one.
    """
    of_stacks = {layer: stack for layer, stack in reversed(stored.stacks)}
    held = {*stored.experts, *of_stacks}
    # A draft that the config does not count is not served, and does no harm.
    end = plan.num_layers + max(plan.num_drafts, 1)
    for layer in sorted({*stored.gates, *held}):
        gate = stored.gates.get(layer, of_stacks.get(layer))
        what = f"{gate.name} in {gate.file}" if gate else "a routed expert"
        if layer >= end:
            raise CheckpointError(
                f"config.json: the model has {plan.num_layers} layers and "
                f"{plan.num_drafts} draft layers, but {what} is of layer {layer}; use "
                "the config of this checkpoint"
            )
        if layer < plan.num_layers and layer not in plan.moe_layers:
            raise CheckpointError(
                f"config.json: layer {layer} is dense by first_k_dense_replace and "
                f"the like, but {what} is stored for it; use the config of this "
                "checkpoint"
            )
    # Families may spell one of the two otherwise, and then no layer has it.
    for what, layers, others in (
        ("router's gate", stored.gates.keys(), held),
        ("routed expert", held, stored.gates.keys()),
    ):
        lacking = sorted(others - layers)
        if layers and lacking and lacking[0] < plan.num_layers:
            raise CheckpointError(
                f"layer {lacking[0]}: no {what} is stored for it, and one is for layer "
                f"{min(layers)}; fetch the missing file, or convert the layer again"
            )
