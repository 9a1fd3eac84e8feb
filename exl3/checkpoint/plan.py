# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The plan of a checkpoint: how every module is stored, told from headers alone.

The server, the tools and `exl3 inspect` all ask it. Nobody downstream parses a tensor's
name or a field of the metadata again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from exl3.checkpoint.headers import TensorHeader, read_folder
from exl3.checkpoint.matrix import Matrix, is_exl3, read_matrix
from exl3.format.constants import Codebook, bits_of
from exl3.format.errors import TensorError
from exl3.format.names import PROJECTION_OF, PROJECTIONS, SHARED_H, parse_name


class Encoding(NamedTuple):
    """How one projection of one expert is coded, in every rank alike."""

    words: int  # int16 words of a tile
    codebook: Codebook

    @property
    def bits(self) -> int | float:
        """Bits per weight."""
        return bits_of(self.words)


@dataclass(frozen=True)
class ExpertLayer:
    """The routed experts of one layer, all of them EXL3."""

    width: int  # routed experts
    ranks: int  # slices that each expert is stored in
    sliced: bool  # names have a `rank` part; False has ranks == 1
    hidden: int  # as stored
    intermediate: int  # of one slice, as stored
    encodings: tuple[
        tuple[Encoding, Encoding, Encoding], ...
    ]  # [expert][gate, up, down]
    spelling: tuple[str, str, str]  # of gate, up and down: gate_proj or w1, ...
    shared_h: bool = False  # hidden-side vectors are stored once for all experts
    packed_signs: bool = False  # legacy `su` and `sv` somewhere among the experts

    def matrix(self, expert: int, projection: str) -> Encoding:
        """The code of an expert's "gate", "up" or "down"."""
        return self.encodings[expert][PROJECTIONS.index(projection)]

    def shape(self, projection: str) -> tuple[int, int]:
        """Stored [in-features, out-features] of one slice of a projection."""
        shape = self.hidden, self.intermediate
        return shape[::-1] if projection == "down" else shape


@dataclass(frozen=True)
class CheckpointPlan:
    """How every EXL3 module of a checkpoint is stored. Other modules are dense.

    Names are the checkpoint's: `model.layers.3.self_attn.q_proj`, and
    `model.layers.3.mlp.experts` for the routed experts of a layer.
    """

    linears: Mapping[str, Matrix] = field(default_factory=dict)
    experts: Mapping[str, ExpertLayer] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # one line each, to be logged

    @property
    def is_exl3(self) -> bool:
        """Whether anything in the checkpoint is EXL3."""
        return bool(self.linears or self.experts)

    def is_superseded(self, name: str) -> bool:
        """Whether a tensor is a dense weight that a trellis took the place of.

        Loaders read whole files, so such a tensor still arrives, and is to be dropped.
        """
        match = parse_name(name)
        if match is None or match["field"] != "weight":
            return False
        return match["experts"] in self.experts or match["module"] in self.linears


def read_plan(folder: Path, config: Mapping[str, Any]) -> CheckpointPlan:
    """Reads how a checkpoint is stored; no weight is read.

    Args:
        folder: The checkpoint's folder.
        config: Its `config.json`, as a plain dictionary.

    Raises:
        CheckpointError: The checkpoint contradicts itself or cannot be served.
    """
    return plan_of(read_folder(folder), config)


def plan_of(
    headers: Iterable[TensorHeader], config: Mapping[str, Any]
) -> CheckpointPlan:
    """The plan of a checkpoint with these tensors; see `read_plan`."""
    modules: dict[str, dict[str, TensorHeader]] = {}
    layers: dict[str, dict[tuple[str, str, str | None], dict[str, TensorHeader]]] = {}
    for header in headers:
        match = parse_name(header.name)
        if match is None:
            continue
        module, experts, expert, projection, rank, name = match.groups()
        if experts is None:
            modules.setdefault(module, {})[name] = header
        else:
            layer = layers.setdefault(experts, {})
            layer.setdefault((expert, projection, rank), {})[name] = header
    linears = {
        module: read_matrix(module, fields)
        for module, fields in modules.items()
        if is_exl3(fields)
    }
    experts_of = {}
    for name, slices in layers.items():
        if any(is_exl3(fields) for fields in slices.values()):
            experts_of[name] = _expert_layer(name, slices)
    return CheckpointPlan(linears, experts_of)


def _expert_layer(
    name: str, slices: Mapping[tuple[str, str, str | None], dict[str, TensorHeader]]
) -> ExpertLayer:
    shared: dict[str, set[str]] = {}
    for (expert, projection, _), fields in slices.items():
        if expert == SHARED_H:
            shared.setdefault(PROJECTION_OF[projection], set()).update(fields)
    matrices: dict[tuple[int, str, int], Matrix] = {}
    spelling: dict[str, str] = {}
    sliced = False
    for (expert, projection, rank), fields in slices.items():
        if expert == SHARED_H or not is_exl3(fields):
            continue
        part = PROJECTION_OF[projection]
        spelling[part] = projection
        sliced |= rank is not None
        label = f"{name}.{expert}.{projection}"
        label += "" if rank is None else f".rank{rank}"
        matrix = read_matrix(label, fields, frozenset(shared.get(part, ())))
        matrices[int(expert), part, int(rank or 0)] = matrix
    width = 1 + max(expert for expert, _, _ in matrices)
    ranks = 1 + max(rank for _, _, rank in matrices)
    sizes: tuple[int, int] | None = None
    encodings = []
    for index in range(width):
        codes = []
        for part in PROJECTIONS:
            for slice_ in range(ranks):
                stored = matrices.get((index, part, slice_))
                if stored is None:
                    raise TensorError(
                        f"{name}: expert {index} has no {part} projection for rank "
                        f"{slice_}; fetch the missing file"
                    )
                found = stored.in_features, stored.out_features
                found = found[::-1] if part == "down" else found
                sizes = sizes or found
                if found != sizes:
                    raise TensorError(
                        f"{name}: expert {index}'s {part} projection has hidden and "
                        f"intermediate sizes {found}, and others {sizes}"
                    )
                code = Encoding(stored.words, stored.codebook)
            codes.append(code)
        encodings.append((codes[0], codes[1], codes[2]))
    assert sizes is not None
    return ExpertLayer(
        width,
        ranks,
        sliced,
        *sizes,
        tuple(encodings),
        (spelling["gate"], spelling["up"], spelling["down"]),
        bool(shared),
        any(matrix.packed_in or matrix.packed_out for matrix in matrices.values()),
    )
