# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Encoding with error feedback: what one block of rows gets wrong, the others mend.

With the second moments H of the inputs, an error E of the weights costs
`tr(E.T @ H @ E)`. Written as `H = L D L.T`, with blocks of 16 rows and L's diagonal
blocks the identity, that is a sum over blocks b of errors weighted by D,

    Z_b - Q_b,    Z_b = W_b + sum over j > b of L[j, b].T @ (W_j - Q_j)

so from the last block to the first, each is encoded as near to Z_b as can be.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from exl3.codec.hadamard import rotate_columns, rotate_rows
from exl3.codec.viterbi import quantize_matrix
from exl3.format.constants import HADAMARD, TILE, Codebook

#: Added to H's diagonal, as a share of its mean: the inputs that calibration saw are
#: not all there are.
DAMPING = 0.025
_RETRIES = 10
#: A mean square of the inputs below this is no calibration.
_LEAST_MOMENT = 1e-20


def feedback_factor(hessian: Tensor, su: Tensor) -> Tensor | None:
    """The factor L for a regularized matrix, less its diagonal blocks.

    Args:
        hessian: Second moments of the layer's inputs, float32 `[k, k]`.
        su: Signs and scales of the inputs `[k]`: the moments of what reaches the
            trellis are those of the inputs times these, rotated.

    Returns:
        float32 `[k, k]`; None where the moments hold nothing to go by.
    """
    if not hessian.isfinite().all() or hessian.diagonal().mean() < _LEAST_MOMENT:
        return None
    # In place where it can be: of a large layer, each of these is hundreds of MB.
    rotated = hessian * su
    rotated *= su.unsqueeze(1)
    rotated = rotate_rows(rotate_columns(rotated))
    rotated = (rotated + rotated.T).div_(2)
    # Only ratios count from here on; without this, float32 may underflow.
    rotated /= rotated.diagonal().mean().clamp(min=_LEAST_MOMENT)
    rotated.diagonal().add_(DAMPING)
    for _ in range(_RETRIES + 1):
        factor, failed = torch.linalg.cholesky_ex(rotated)
        if not failed and factor.isfinite().all():
            break
        rotated.diagonal().add_(2 * DAMPING)
    else:
        return None
    for first in range(0, len(factor), TILE):
        block = slice(first, first + TILE)
        factor[:, block] = torch.linalg.solve_triangular(
            factor[block, block], factor[:, block], upper=False, left=False
        )
        factor[block, block] = 0
    return factor


def quantize_with_feedback(
    inner: Tensor,
    factor: Tensor,
    words: int,
    codebook: Codebook,
    progress: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Encodes a matrix with error feedback.

    Args:
        inner: float32 `[k, n]`, on the codebook's scale.
        factor: Of `feedback_factor`, `[k, k]`.
        words: int16 words of a tile.
        codebook: The trellis's codebook.
        progress: Called with the number of weights done since the last call.

    Returns:
        The trellis, int16 `[k/16, n/16, words]`, and the matrix that it decodes to.
    """
    k = len(inner)
    target = inner.clone()  # W and the feedback of the blocks that are done
    quantized = torch.empty_like(inner)
    packed: list[Tensor] = []
    # The feedback goes at once to the 128 rows at work, and to all others when these
    # are done: one large product instead of eight thin ones.
    for start in range(k - HADAMARD, -1, -HADAMARD):
        span = slice(start, start + HADAMARD)
        for first in range(start + HADAMARD - TILE, start - 1, -TILE):
            block = slice(first, first + TILE)
            trellis, quantized[block] = quantize_matrix(target[block], words, codebook)
            packed.append(trellis)
            error = inner[block] - quantized[block]
            target[start:first] += factor[block, start:first].T @ error
            progress(error.numel())
        target[:start] += factor[span, :start].T @ (inner[span] - quantized[span])
    return torch.cat(packed[::-1]), quantized
