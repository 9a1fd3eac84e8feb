# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How a module is cut for the ranks of tensor parallelism.

Every cut of a trellis lies at a multiple of 128, since features are rotated in blocks
of 128 on both sides. What is cut is the stored width, padding included, so that a
padded intermediate is cut alike on both of its sides.
"""

from dataclasses import dataclass

from exl3.checkpoint.plan import ExpertLayer
from exl3.format.constants import HADAMARD
from exl3.format.errors import RankError


@dataclass(frozen=True)
class ExpertPart:
    """What one rank holds of each expert of a layer."""

    slices: range  # stored ranks, each of them one virtual expert
    start: int  # first intermediate feature within each of these slices
    stop: int  # end of the intermediate features within each of these slices

    @property
    def intermediate(self) -> int:
        """Intermediate features of one virtual expert."""
        return self.stop - self.start


def cut(features: int, size: int, rank: int, what: str) -> tuple[int, int]:
    """The range of a stored dimension that a rank holds.

    Args:
        features: The dimension as stored.
        size: Tensor-parallel ranks.
        rank: This one.
        what: The tensor and the dimension, for the refusal.

    Raises:
        RankError: The cut does not lie at multiples of 128.
    """
    if features % (HADAMARD * size):
        legal = [n for n in range(1, 65) if features % (HADAMARD * n) == 0]
        raise RankError(
            f"{what}: {features} features do not divide into {size} parts of whole "
            f"blocks of {HADAMARD}; tensor-parallel sizes that divide them: {legal}"
        )
    part = features // size
    return part * rank, part * (rank + 1)


def expert_part(layer: ExpertLayer, name: str, size: int, rank: int) -> ExpertPart:
    """What a rank holds of the experts of a layer.

    Args:
        layer: The experts as stored, in `layer.ranks` slices.
        name: The layer's name, for the refusal.
        size: Tensor-parallel ranks.
        rank: This one.

    Raises:
        RankError: Neither divides the other, or a slice cannot be cut so often.
    """
    if layer.ranks % size == 0:
        count = layer.ranks // size
        slices = range(rank * count, (rank + 1) * count)
        return ExpertPart(slices, 0, layer.intermediate)
    cuts, rest = divmod(size, layer.ranks)
    if rest or layer.intermediate % (HADAMARD * cuts):
        raise RankError(
            f"{name}: experts in {layer.ranks} slices of {layer.intermediate} cannot "
            f"be shared by {size} ranks; tensor-parallel sizes that can: "
            f"{[n for n in range(1, 65) if _is_legal(layer, n)]}"
        )
    start, stop = cut(layer.intermediate, cuts, rank % cuts, name)
    first = rank // cuts
    return ExpertPart(range(first, first + 1), start, stop)


def _is_legal(layer: ExpertLayer, size: int) -> bool:
    cuts, rest = divmod(size, layer.ranks)
    return layer.ranks % size == 0 or (
        rest == 0 and layer.intermediate % (HADAMARD * cuts) == 0
    )


@dataclass(frozen=True)
class Blocks:
    """Whole blocks of 128 columns around a range of columns."""

    start: int  # first stored column, a multiple of 128
    stop: int  # end of the stored columns, a multiple of 128
    skip: int  # columns before the range
    keep: int  # columns of the range that are stored


def blocks_around(start: int, stop: int, stored: int) -> Blocks:
    """The blocks that a rank of a vocabulary-parallel head keeps.

    vLLM cuts the vocabulary where it likes, so a rank keeps every block that its range
    touches. Columns past the stored ones are padding, and nobody keeps them.
    """
    stop = min(stop, stored)
    start = min(start, stop)
    first = start // HADAMARD * HADAMARD
    last = -(-stop // HADAMARD) * HADAMARD
    return Blocks(first, max(first, last), start - first, stop - start)
