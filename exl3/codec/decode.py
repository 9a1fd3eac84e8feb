# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""From the stored tensors of a linear layer to its weights: the readable reference.

The layer computes, with H the rotation of hadamard.py on each side,

    y = ((x * suh) H W H) * svh + bias

where the trellis holds W, the inner matrix.
"""

import torch
from torch import Tensor

from exl3.codec.hadamard import rotate_columns, rotate_rows
from exl3.codec.tiles import decode_tiles
from exl3.format.constants import Codebook


def inner_matrix(trellis: Tensor, codebook: Codebook) -> Tensor:
    """The matrix that a trellis holds.

    Args:
        trellis: int16 `[k/16, n/16, words]`, as stored.
        codebook: Which values its states mean.

    Returns:
        float32 `[k, n]`; every weight is an fp16 number.
    """
    tiles = decode_tiles(trellis, codebook)
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)


def effective_weight(inner: Tensor, suh: Tensor, svh: Tensor) -> Tensor:
    """The weight `[k, n]` that x is multiplied with in effect, in inner's dtype.

    Args:
        inner: The inner matrix `[k, n]`.
        suh: Signs and scales of the inputs `[k]`.
        svh: Signs and scales of the outputs `[n]`.
    """
    rotated = rotate_rows(rotate_columns(inner))
    return suh.to(inner.dtype).unsqueeze(1) * rotated * svh.to(inner.dtype)


def decode_weight(
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    codebook: Codebook,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The effective weight `[k, n]` of stored tensors, computed in a dtype."""
    return effective_weight(inner_matrix(trellis, codebook).to(dtype), suh, svh)


def expand_signs(packed: Tensor) -> Tensor:
    """Unpacks the legacy `su` and `sv`, int16 `[features/16]`, to fp16 `[features]`.

    Bit i, from the least, of word j is set where feature `16 * j + i` is negative.
    """
    bit = torch.arange(16, device=packed.device)
    negative = packed.long().unsqueeze(-1) >> bit & 1
    return (1 - 2 * negative).flatten().half()
