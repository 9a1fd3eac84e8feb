# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A checkpoint as a pruner sees it: its layers with routed experts, and their parts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.headers import list_folder
from exl3.checkpoint.layers import LayerPlan
from exl3.checkpoint.modules import Fields
from exl3.checkpoint.plan import read_config, read_with_modules, text_config
from exl3.checkpoint.routing import Routing
from exl3.checkpoint.stored_widths import StoredWidths
from exl3.format.errors import TensorError, UnsupportedFormatError
from exl3.format.names import SHARED_H, STACKS, parse_name

#: The tensors of a router. Both have a row for each routed expert.
_ROUTER_FIELDS = ("weight", "e_score_correction_bias")


@dataclass(frozen=True)
class RoutedLayer:
    """The routed experts of one layer, as they are stored.

    Attributes:
        index: The layer's global index; draft layers come after the decoder layers.
        name: The module of router and experts, `model.layers.3.mlp`.
        width: Routed experts.
        is_draft: Whether it is a draft (MTP) layer.
        routing: What its router chooses from.
        expert_bytes: Bytes that leave the checkpoint with each expert, its rows of the
            router included.
    """

    index: int
    name: str
    width: int
    is_draft: bool
    routing: Routing
    expert_bytes: tuple[int, ...]


class Part(NamedTuple):
    """What a tensor has to do with the routed experts of a layer."""

    layer: int  # global index
    expert: int | None  # None: the tensor has a row for each expert


@dataclass(frozen=True)
class Source:
    """A checkpoint to prune, told from its headers.

    Attributes:
        folder: Where it lies.
        config: Its `config.json`.
        headers: Every tensor.
        parts: Of the tensors that belong to routed experts, by name.
        layers: The layers that have routed experts, by global index.
        num_layers: All layers, draft layers included.
        is_exl3: Whether anything in it is EXL3.
    """

    folder: Path
    config: Mapping[str, Any]
    headers: tuple[TensorHeader, ...]
    parts: Mapping[str, Part]
    layers: Mapping[int, RoutedLayer]
    num_layers: int
    is_exl3: bool

    def of_kind(self, *, is_draft: bool) -> list[RoutedLayer]:
        """The decoder layers with routed experts, or the draft layers."""
        return [at for at in self.layers.values() if at.is_draft == is_draft]

    def num_bytes(self, kept: Mapping[int, tuple[int, ...]]) -> int:
        """Bytes of all tensors when layers keep these experts, and others all."""
        total = sum(header.num_bytes for header in self.headers)
        for index, experts in kept.items():
            sizes = self.layers[index].expert_bytes
            total -= sum(sizes) - sum(sizes[expert] for expert in experts)
        return total


def read_source(folder: Path) -> Source:
    """Reads a checkpoint's headers.

    Raises:
        CheckpointError: It contradicts itself, or has nothing that can be pruned.
    """
    config = read_config(folder)
    checkpoint, modules = read_with_modules(folder, config)
    if not checkpoint.plan.is_exl3:  # of EXL3 ones it is a part of the plan
        listing = list_folder(folder)
        listing.check()
        listing.check_unlisted(lambda _name: False)
    text, stored = text_config(config), checkpoint.widths
    resolve_widths(text, stored)
    plan = LayerPlan.from_config(text)
    num_layers = plan.num_layers + max(plan.num_drafts, stored.num_mtp)
    names = {index: _mlp_of(gate) for index, gate in sorted(stored.gates.items())}
    if not names:
        raise UnsupportedFormatError(
            f"{folder}: no layer has a router, mlp.gate.weight, and so no routed "
            "experts that could be pruned; name a mixture-of-experts checkpoint"
        )
    last = max(names)
    if last >= num_layers:
        raise TensorError(
            f"{stored.gates[last].name}: is of layer {last}, but config.json counts "
            f"{num_layers} layers with the draft's; use the config of this checkpoint"
        )
    parts = dict(_parts(modules, names, stored))
    headers = tuple(header for of in modules.values() for header in of.values())
    sizes = _expert_bytes(headers, parts, names, stored)
    routing = Routing.from_config(text, biased=bool(stored.biases))
    layers = {
        index: RoutedLayer(
            index=index,
            name=name,
            width=stored.gates[index].shape[0],
            is_draft=index >= plan.num_layers,
            routing=routing,
            expert_bytes=tuple(sizes[index]),
        )
        for index, name in names.items()
    }
    return Source(
        folder=folder,
        config=config,
        headers=headers,
        parts=parts,
        layers=layers,
        num_layers=num_layers,
        is_exl3=checkpoint.plan.is_exl3,
    )


def _mlp_of(gate: TensorHeader) -> str:
    return gate.name.rpartition(".")[0].removesuffix(".gate")


def _parts(
    modules: Mapping[str, Fields], names: Mapping[int, str], stored: StoredWidths
) -> Iterator[tuple[str, Part]]:
    """Finds every tensor of the routed experts and of their routers.

    Raises:
        CheckpointError: One of them cannot be pruned.
    """
    layers = {name: index for index, name in names.items()}
    for module, fields in modules.items():
        mlp, _, rest = f"{module}.".partition(".experts.")
        if module.endswith(".gate"):
            mlp = module.removesuffix(".gate")
        elif not module.startswith(f"{mlp}.experts"):
            continue
        index = layers.get(mlp)
        if index is None:
            continue
        match = parse_name(f"{module}.weight")
        expert = match["expert"] if match else None
        for field, header in fields.items():
            if expert == SHARED_H:
                continue
            if expert is not None and expert == str(int(expert)):
                yield header.name, Part(index, int(expert))
                continue
            known = _ROUTER_FIELDS if module.endswith(".gate") else STACKS
            if (rest.rstrip(".") or field) not in known:
                raise UnsupportedFormatError(
                    f"{header.file}: {header.name} belongs to the experts of layer "
                    f"{index}, and it is not known how to prune it; store the router "
                    "as a dense weight with its bias, and the experts by index"
                )
            width = stored.gates[index].shape[0]
            if header.shape[:1] != (width,):
                raise TensorError(
                    f"{header.file}: {header.name} has shape {list(header.shape)}; "
                    f"expected a row for each of the {width} experts of its layer"
                )
            yield header.name, Part(index, None)


def _expert_bytes(
    headers: tuple[TensorHeader, ...],
    parts: Mapping[str, Part],
    names: Mapping[int, str],
    stored: StoredWidths,
) -> dict[int, list[int]]:
    """Bytes of each expert of each layer.

    Raises:
        TensorError: A layer has a router and no experts.
    """
    sizes = {index: [0] * stored.gates[index].shape[0] for index in names}
    for header in headers:
        part = parts.get(header.name)
        if part is None:
            continue
        of = sizes[part.layer]
        if part.expert is not None:
            of[part.expert] += header.num_bytes
            continue
        row = header.num_bytes // len(of)
        sizes[part.layer] = [size + row for size in of]
    stacked = {index for index, _ in stored.stacks}
    for index, name in names.items():
        if index not in stored.experts and index not in stacked:
            raise TensorError(
                f"{stored.gates[index].name}: the checkpoint has this router and none "
                f"of its experts, {name}.experts; fetch the missing files"
            )
    return sizes
