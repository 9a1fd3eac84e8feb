# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The routed experts of one layer: what their tensors must look like, and say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.matrix import Matrix, MatrixReader, is_exl3
from exl3.format.constants import Codebook, bits_of
from exl3.format.errors import TensorError, UnsupportedFormatError
from exl3.format.names import PROJECTION_OF, PROJECTIONS, SHARED_H

#: The vector of a projection whose length is the hidden size.
HIDDEN_SIDE = {"gate": "suh", "up": "suh", "down": "svh"}


class Encoding(NamedTuple):
    """How one projection of one expert is coded, in every slice alike."""

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
    sliced: bool  # names have a `rank` part; without, ranks is 1
    hidden: int  # as stored, a multiple of 128
    intermediate: int  # of one slice, as stored, a multiple of 128
    encodings: tuple[tuple[Encoding, Encoding, Encoding], ...]  # gate, up, down
    spelling: tuple[str, str, str]  # of gate, up and down: gate_proj or w1, ...
    shared_h: bool = False  # hidden-side vectors are stored once for all experts

    def matrix(self, expert: int, projection: str) -> Encoding:
        """The code of an expert's "gate", "up" or "down"."""
        return self.encodings[expert][PROJECTIONS.index(projection)]

    def shape(self, projection: str) -> tuple[int, int]:
        """Stored [in-features, out-features] of one slice of a projection."""
        shape = self.hidden, self.intermediate
        return shape[::-1] if projection == "down" else shape


class Slice(NamedTuple):
    """The tensors of one projection of one expert, in one of its slices."""

    expert: str  # an index, or `shared_h`
    projection: str  # as the names spell it
    rank: str | None
    fields: Mapping[str, TensorHeader]


def read_expert_layer(
    name: str, slices: Iterable[Slice], reader: MatrixReader
) -> ExpertLayer:
    """Checks the EXL3 experts of a layer.

    Args:
        name: The experts' module, such as `model.layers.3.mlp.experts`.
        slices: Everything that is stored of them.
        reader: Reads the matrices.

    Raises:
        CheckpointError: A tensor is missing, doubled or misshaped, or the experts are
            not alike in what they must have in common.
    """
    layer = _Layer(name, reader)
    slices = tuple(slices)
    for part in slices:
        if part.expert == SHARED_H:
            layer.add_shared(part)
    for part in slices:
        if part.expert != SHARED_H and is_exl3(part.fields):
            layer.add(part)
    return layer.finish(slices)


class _Layer:
    """Collects the slices of a layer, and then looks at them together."""

    def __init__(self, name: str, reader: MatrixReader):
        self.name = name
        self.reader = reader
        self.matrices: dict[tuple[int, str, int], Matrix] = {}
        self.shared: dict[tuple[str, int], TensorHeader] = {}
        self.spelling: dict[str, str] = {}
        self.with_rank: str | None = None  # one name with a rank, and one without
        self.without_rank: str | None = None

    def add_shared(self, part: Slice) -> None:
        projection = PROJECTION_OF[part.projection]
        expected = HIDDEN_SIDE[projection]
        for field, header in part.fields.items():
            if part.rank is None or field != expected:
                raise TensorError(
                    f"{header.file}: {header.name} is not a vector that the experts of "
                    f"a layer can share; {part.projection} has {expected} for each rank"
                )
            self.shared[projection, int(part.rank)] = header

    def add(self, part: Slice) -> None:
        label = f"{self.name}.{part.expert}.{part.projection}"
        if part.rank is None:
            self.without_rank = label
        else:
            label += f".rank{part.rank}"
            self.with_rank = label
        if self.with_rank and self.without_rank:
            raise TensorError(
                f"{self.name}: {self.with_rank} is one rank's slice and "
                f"{self.without_rank} a whole matrix; store all experts of a layer "
                "either in slices or whole"
            )
        projection = PROJECTION_OF[part.projection]
        shared = {HIDDEN_SIDE[projection]} if self.shared else set()
        matrix = self.reader.read(label, part.fields, frozenset(shared))
        if matrix.has_bias:
            raise UnsupportedFormatError(
                f"{label}.bias: routed experts with a bias are not supported"
            )
        key = int(part.expert), projection, int(part.rank or 0)
        if key in self.matrices or _padded_index(part):
            raise TensorError(
                f"{label}: indices have no leading zeros, and a projection has one "
                f"name, {self.spelling.get(projection, part.projection)}; rename the "
                "tensors, or remove one of them"
            )
        if self.spelling.setdefault(projection, part.projection) != part.projection:
            raise TensorError(
                f"{label}: other experts of the layer spell this projection "
                f"{self.spelling[projection]}; rename the tensors"
            )
        self.matrices[key] = matrix

    def finish(self, slices: tuple[Slice, ...]) -> ExpertLayer:
        width = 1 + max((expert for expert, _, _ in self.matrices), default=-1)
        ranks = 1 + max((rank for _, _, rank in self.matrices), default=-1)
        if not width or len(self.matrices) != 3 * width * ranks:
            raise self._missing(width, ranks, slices)
        self._check_shared(ranks)
        first = self.matrices[0, "gate", 0]
        hidden, intermediate = first.in_features, first.out_features
        self._check_sizes(hidden, intermediate)
        for side, size in self.shared.items():
            if size.dtype != "F16" or size.shape != (hidden,):
                raise TensorError(
                    f"{size.file}: {size.name} is {size.dtype} of shape "
                    f"{list(size.shape)}; expected F16 of shape [{hidden}], as the "
                    f"{side[0]} projection of expert 0 has it"
                )
        known: dict[Encoding, Encoding] = {}  # one object each: a plan stays small
        encodings = []
        for expert in range(width):
            codes = [self._encoding(expert, part, ranks) for part in PROJECTIONS]
            gate, up, down = (known.setdefault(code, code) for code in codes)
            encodings.append((gate, up, down))
        spelling = self.spelling
        return ExpertLayer(
            width=width,
            ranks=ranks,
            sliced=self.with_rank is not None,
            hidden=hidden,
            intermediate=intermediate,
            encodings=tuple(encodings),
            spelling=(spelling["gate"], spelling["up"], spelling["down"]),
            shared_h=bool(self.shared),
        )

    def _missing(
        self, width: int, ranks: int, slices: tuple[Slice, ...]
    ) -> TensorError:
        """Names the first projection that is not stored."""
        dense = {
            (part.expert, PROJECTION_OF[part.projection]): part.fields["weight"]
            for part in slices
            if "weight" in part.fields
        }
        # Ends after as many steps as there are matrices, whatever the indices claim.
        expert, projection, rank = next(
            key
            for key in product(range(width or 1), PROJECTIONS, range(ranks or 1))
            if key not in self.matrices
        )
        weight = dense.get((str(expert), projection))
        if weight is not None:
            return TensorError(
                f"{self.name}: expert {expert} has a dense {projection} projection, "
                f"{weight.name} in {weight.file}, and others are EXL3; store all "
                "experts of a layer in one way"
            )
        of_rank = f" for rank {rank} of {ranks}" if self.with_rank else ""
        return TensorError(
            f"{self.name}: experts go up to {max(width - 1, 0)}, but expert {expert} "
            f"has no trellis of its {projection} projection{of_rank}; fetch the "
            "missing file, or convert the layer again"
        )

    def _check_shared(self, ranks: int) -> None:
        if not self.shared:
            return
        needed = set(product(PROJECTIONS, range(ranks)))
        for projection, rank in sorted(needed ^ self.shared.keys()):
            what = "is missing" if (projection, rank) in needed else "is of no slice"
            raise TensorError(
                f"{self.name}.{SHARED_H}: the {HIDDEN_SIDE[projection]} of the "
                f"{projection} projection's rank {rank} {what}; expected one for each "
                f"projection and each of {ranks} ranks"
            )

    def _check_sizes(self, hidden: int, intermediate: int) -> None:
        for (expert, projection, rank), matrix in self.matrices.items():
            sizes = matrix.in_features, matrix.out_features
            if projection == "down":
                sizes = sizes[::-1]
            if sizes != (hidden, intermediate):
                raise TensorError(
                    f"{self.name}: rank {rank} of expert {expert}'s {projection} "
                    f"projection has {sizes[0]} hidden and {sizes[1]} intermediate "
                    f"features, and expert 0's gate projection {hidden} and "
                    f"{intermediate}; they must be the same"
                )

    def _encoding(self, expert: int, projection: str, ranks: int) -> Encoding:
        first = self.matrices[expert, projection, 0]
        for rank in range(1, ranks):
            other = self.matrices[expert, projection, rank]
            if (first.words, first.codebook) != (other.words, other.codebook):
                raise TensorError(
                    f"{self.name}: expert {expert}'s {projection} projection has "
                    f"{first.bits} bits ({first.codebook.label}) in rank 0 and "
                    f"{other.bits} ({other.codebook.label}) in rank {rank}; encode all "
                    "slices of a projection alike"
                )
        return Encoding(first.words, first.codebook)


def _padded_index(part: Slice) -> bool:
    return any(
        len(index) > 1 and index[0] == "0" for index in (part.expert, part.rank or "")
    )
