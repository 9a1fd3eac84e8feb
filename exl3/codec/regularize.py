# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Makes a weight matrix look like noise of one size, which is what a trellis codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from exl3.codec.hadamard import rotate_columns, rotate_rows
from exl3.format.constants import HADAMARD

#: RMS of a regularized matrix: the standard deviation of the 3inst codebook. Writers
#: use it for every codebook, and the search for the scale makes up for the difference.
INNER_RMS = 1.24371088
#: Keeps a matrix of zeros from dividing by zero.
_TINY = torch.finfo(torch.float32).tiny


@dataclass
class Regularized:
    """A weight and its factors: `weight = diag(su) H inner H diag(sv)`.

    Attributes:
        inner: float32 `[k, n]`, nearly Gaussian, of RMS `INNER_RMS` in every block.
        su: float32 `[k]`; 0 where a row of the weight is all zeros.
        sv: float32 `[n]`; 0 where a column of the weight is all zeros.
    """

    inner: Tensor
    su: Tensor
    sv: Tensor


def regularize(weight: Tensor, seed: int) -> Regularized:
    """Splits a weight into scales, signs and a matrix of even noise.

    Random signs and the rotation spread outliers over a block of 128; scales of the
    columns, then of the rows, take out what is larger as a whole.

    Args:
        weight: float32 `[k, n]`, both multiples of 128.
        seed: Decides the signs.
    """
    k, n = weight.shape
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (k + n,), generator=generator) * 2.0 - 1
    size = _rms_of_columns(weight)
    filled = (size > 0).sum().clamp(min=1)
    sv = size / (size.sum() / filled).clamp(min=_TINY) * signs[k:]
    inner = rotate_columns(weight * _inverse(sv))
    size = _rms_of_columns(inner.T)
    su = size / INNER_RMS * signs[:k]
    inner = rotate_rows(inner * _inverse(su).unsqueeze(1))
    return Regularized(inner, su, sv)


def _rms_of_columns(matrix: Tensor) -> Tensor:
    """The scale `[n]` of each column that leaves its block of 128 columns with RMS 1.

    That is a column's own RMS, but for blocks of which some columns are all zeros: the
    rotation spreads the others over the whole block, and so makes it smaller.
    """
    rms = matrix.square().mean(0).sqrt()
    filled = (rms > 0).float().unflatten(0, (-1, HADAMARD)).mean(1)
    return rms * filled.sqrt().repeat_interleave(HADAMARD)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for 0."""
    return torch.where(scale == 0, 0, 1 / scale)
