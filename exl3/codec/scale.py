# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The search for the scale at which a trellis codes a regularized matrix best."""

import torch
from torch import Tensor

from exl3 import ops
from exl3.codec.viterbi import to_tiles
from exl3.format.constants import TILE, Codebook

#: Where the search begins: the best scale of Gaussian tiles, by bits rounded up.
#: Measured on 256 tiles of RMS INNER_RMS; mul1's values are smaller by 1.24.
_GAUSSIAN = {
    Codebook.INST3: (1.15, 1.0, 0.95, 0.90, 0.90, 0.85, 0.80, 0.75),
    Codebook.MCG: (1.15, 1.0, 0.95, 0.90, 0.90, 0.85, 0.80, 0.75),
    Codebook.MUL1: (0.90, 0.80, 0.75, 0.75, 0.70, 0.70, 0.65, 0.65),
}
#: Feedback makes a tile larger than the matrix is, the more the fewer bits: the factor
#: by words of a tile.
_FEEDBACK_GROWTH = {16: 1.08, 24: 1.035, 32: 1.018, 40: 1.009, 48: 1.004}
_STEP = 0.05
#: Tiles to search with. All are nearly Gaussian and of the same size, so a few tell,
#: and a step beside the best scale costs 1% to 3% of the error.
_SAMPLE = 48


def gaussian_scale(words: int, codebook: Codebook) -> float:
    """The best scale for tiles of Gaussian noise of RMS `INNER_RMS`."""
    return _GAUSSIAN[codebook][-(-words // TILE) - 1]


def search_scale(
    inner: Tensor, words: int, codebook: Codebook, feedback: bool = False
) -> float:
    """Finds what a regularized matrix is best multiplied with before it is encoded.

    A larger scale uses the codebook's finer values, and cuts off more of the tails.
    Compares scales around the Gaussian's best on sampled tiles, and takes the lowest
    point of the parabola through the best three.

    Args:
        inner: float32 `[k, n]`.
        words: int16 words of a tile.
        codebook: The trellis's codebook.
        feedback: Whether the matrix is going to be encoded with error feedback.
    """
    sample = _sample(to_tiles(inner).flatten(0, 1))
    if feedback:
        sample = sample * _FEEDBACK_GROWTH.get(words, 1.0)

    def error(steps: int) -> float:
        scale = steps * _STEP
        _, values = ops.encode_tiles(sample * scale, words, codebook)
        return (values / scale - sample).square().mean().item()

    best = round(gaussian_scale(words, codebook) / _STEP)
    errors = {steps: error(steps) for steps in (best - 1, best, best + 1)}
    # Downhill until both neighbours are higher.
    while (best := min(errors, key=errors.__getitem__)) > 1:
        missing = {best - 1, best + 1} - errors.keys()
        if not missing or max(errors) > 2 / _STEP:
            break
        errors |= {steps: error(steps) for steps in missing}
    return _STEP * (best + _vertex(*(errors.get(best + d) for d in (-1, 0, 1))))


def _sample(tiles: Tensor) -> Tensor:
    order = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))
    return tiles[order[:_SAMPLE]]


def _vertex(left: float | None, middle: float | None, right: float | None) -> float:
    """Where a parabola through the points at -1, 0 and 1 is lowest, within half."""
    if left is None or middle is None or right is None:
        return 0.0
    bend = left - 2 * middle + right
    return max(-0.5, min(0.5, (left - right) / (2 * bend))) if bend > 0 else 0.0
