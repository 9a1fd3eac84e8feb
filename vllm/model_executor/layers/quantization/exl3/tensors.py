# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Checks the tensors of an EXL3 matrix as they arrive, and keeps count of them."""

from collections.abc import Iterable

import torch

from exl3.checkpoint.matrix import Matrix
from exl3.codec import expand_signs
from exl3.format.constants import MULTIPLIERS, TILE, Codebook
from exl3.format.errors import TensorError
from exl3.format.metadata import check_multiplier

TRELLIS, INPUT, OUTPUT, MARKER, BIAS = 1, 2, 4, 8, 16
#: The part of a matrix that a tensor is, by the last part of its name.
PARTS = {
    "trellis": TRELLIS,
    "suh": INPUT,
    "su": INPUT,
    "svh": OUTPUT,
    "sv": OUTPUT,
    "mcg": MARKER,
    "mul1": MARKER,
    "bias": BIAS,
}
_SPELLING = {TRELLIS: "trellis", INPUT: "suh", OUTPUT: "svh", MARKER: "", BIAS: "bias"}


class Arrivals:
    """Which tensors of a matrix, or of many, have arrived in one load."""

    def __init__(self) -> None:
        self._parts: dict[object, int] = {}

    def add(self, matrix: object, field: str, name: str) -> None:
        """Counts a tensor.

        Args:
            matrix: What it belongs to.
            field: The last part of its name.
            name: Its name.

        Raises:
            TensorError: It was there already.
        """
        part = PARTS[field]
        seen = self._parts.get(matrix, 0)
        if seen & part:
            raise TensorError(
                f"{name}: stored twice; remove it from one of the files, or list the "
                "right one in the index"
            )
        self._parts[matrix] = seen | part

    def missing(self, matrix: object, needed: int, codebook: Codebook) -> Iterable[str]:
        """The fields of a matrix that did not arrive."""
        absent = needed & ~self._parts.get(matrix, 0)
        for part, field in _SPELLING.items():
            if absent & part:
                yield field or codebook.label


def needed_parts(codebook: Codebook, has_bias: bool = False) -> int:
    """The parts that a matrix of a codebook is stored in."""
    parts = TRELLIS | INPUT | OUTPUT
    parts |= MARKER if codebook in MULTIPLIERS else 0
    return parts | (BIAS if has_bias else 0)


def check_trellis(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    """Refuses a trellis that differs from what the plan was made from.

    Args:
        tensor: int16 [k/16, n/16, words].
        shape: The planned shape.
        name: Its name.
    """
    if tensor.dtype != torch.int16 or tuple(tensor.shape) != shape:
        raise TensorError(
            f"{name}: {tensor.dtype} of shape {list(tensor.shape)} arrived, and its "
            f"header says torch.int16 of shape {list(shape)}; fetch the file again"
        )


def trellis_shape(matrix: Matrix) -> tuple[int, int, int]:
    """The stored shape of a trellis: [k/16, n/16, words]."""
    return matrix.in_features // TILE, matrix.out_features // TILE, matrix.words


def scales(tensor: torch.Tensor, field: str, size: int, name: str) -> torch.Tensor:
    """The scales of one side of a matrix, float16 [size].

    Args:
        tensor: float16 [size], or for the legacy `su` and `sv` int16 [size / 16]: a
            bit for each sign, the lowest first, and set for minus one.
        field: suh, svh, su or sv.
        size: Features of the side, as stored.
        name: The tensor's name.

    Raises:
        TensorError: It is misshaped, or not finite.
    """
    packed = field in ("su", "sv")
    dtype = torch.int16 if packed else torch.float16
    shape = [size // TILE] if packed else [size]
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        raise TensorError(
            f"{name}: {tensor.dtype} of shape {list(tensor.shape)} arrived; expected "
            f"{dtype} of shape {shape}; fetch the file again"
        )
    if packed:
        return expand_signs(tensor)
    if not torch.isfinite(tensor).all():
        raise TensorError(
            f"{name}: holds NaN or infinity; the conversion failed for this matrix, "
            "convert it again"
        )
    return tensor


def check_marker(tensor: torch.Tensor, codebook: Codebook, name: str) -> None:
    """Refuses a marker of another multiplier than its codebook's."""
    values = tensor.flatten()[:2].tolist()
    check_multiplier(values[0] if len(values) == 1 else values, codebook, name)
