# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Matrices through the tile encoder."""

from torch import Tensor

from exl3 import ops
from exl3.format.constants import TILE, Codebook


def to_tiles(matrix: Tensor) -> Tensor:
    """The 16 x 16 tiles of `[k, n]`, row by row: `[k/16, n/16, 256]`."""
    rows = matrix.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    return rows.transpose(1, 2).flatten(2)


def from_tiles(tiles: Tensor) -> Tensor:
    """The matrix `[k, n]` of tiles `[k/16, n/16, 256]`."""
    return tiles.unflatten(2, (TILE, TILE)).transpose(1, 2).flatten(2).flatten(0, 1)


def quantize_matrix(
    matrix: Tensor, words: int, codebook: Codebook
) -> tuple[Tensor, Tensor]:
    """Encodes a matrix, each tile by itself.

    Args:
        matrix: float32 `[k, n]`, multiples of 16, on the codebook's scale.
        words: int16 words of a tile.
        codebook: The trellis's codebook.

    Returns:
        The trellis, int16 `[k/16, n/16, words]`, and the matrix that it decodes to.
    """
    tiles = to_tiles(matrix)
    packed, values = ops.encode_tiles(tiles.flatten(0, 1), words, codebook)
    grid = tiles.shape[:2]
    return packed.unflatten(0, grid), from_tiles(values.unflatten(0, grid))
