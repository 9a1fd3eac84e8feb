# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The rotation of 128 features at a time."""

from functools import cache

import torch
from torch import Tensor

from exl3.format.constants import HADAMARD


@cache
def hadamard_matrix(dtype: torch.dtype) -> Tensor:
    """The Sylvester-Hadamard matrix over the square root of 128, `[128, 128]`.

    Entry `[i, j]` is negative where `i & j` has an odd number of bits. The matrix is
    symmetric and its own inverse.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < HADAMARD:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]
        )
    return (matrix / HADAMARD**0.5).to(dtype)


def rotate_columns(x: Tensor) -> Tensor:
    """Multiplies each block of 128 columns of `[..., n]` by the matrix."""
    blocks = x.unflatten(-1, (-1, HADAMARD))
    return (blocks @ hadamard_matrix(x.dtype)).flatten(-2)


def rotate_rows(x: Tensor) -> Tensor:
    """Multiplies each block of 128 rows of `[k, n]` by the matrix."""
    blocks = x.unflatten(0, (-1, HADAMARD))
    return (hadamard_matrix(x.dtype) @ blocks).flatten(0, 1)
