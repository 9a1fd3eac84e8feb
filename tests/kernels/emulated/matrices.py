# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Random EXL3 matrices with the float64 weights that they stand for."""

from dataclasses import dataclass

import numpy as np

from tests.reference_codec import CODEBOOKS, SIGMA, dense_weight

#: Every kind of tile: (words, codebook). Half rates are mul1's only.
KINDS = [
    *((words, codebook) for words in range(16, 129, 16) for codebook in range(3)),
    *((words, 2) for words in (24, 40, 56)),
]


@dataclass(frozen=True)
class Matrix:
    """One stored matrix.

    `trellis` is strip-major, int16 [n/16, k/16, words]; `dense` is float64 [k, n].
    """

    trellis: np.ndarray
    suh: np.ndarray
    svh: np.ndarray
    dense: np.ndarray
    words: int
    codebook: int


def make_matrix(
    rng: np.random.Generator, k: int, n: int, words: int, codebook: int
) -> Matrix:
    """Random tiles and scales, such that outputs of unit inputs are about 1."""
    stored = rng.integers(-(2**15), 2**15, (k // 16, n // 16, words)).astype(np.int16)
    name = CODEBOOKS[codebook]
    size = rng.uniform(0.5, 2.0, k) / (SIGMA[name] * np.sqrt(k))
    suh = (rng.choice([-1.0, 1.0], k) * size).astype(np.float16)
    svh = rng.normal(1.0, 0.3, n).astype(np.float16)
    dense = dense_weight(stored, suh, svh, name)
    strips = np.ascontiguousarray(stored.transpose(1, 0, 2))
    return Matrix(strips, suh, svh, dense, words, codebook)
