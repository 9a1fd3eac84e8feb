# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Random EXL3 matrices as the ops take them, with the dense weights they stand for.

Any words are a valid trellis. The dense weights are float64, by
`tests.reference_codec`, which shares no code with the ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests import reference_codec

#: Every rate and codebook that the format has: (words of a tile, codebook).
RATES = [
    *((16 * bits, codebook) for codebook in (0, 1, 2) for bits in range(1, 9)),
    *((words, 2) for words in (24, 40, 56)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Values of EXL3_CPU_ISA. A machine without one of them runs the best that it has.
ISAS = ["portable", "avx2", "avx512", "avx512fp16", "amx"]


@dataclass(frozen=True)
class Layer:
    """One stored matrix."""

    trellis: np.ndarray  # int16 [k / 16, n / 16, words]
    suh: np.ndarray  # float16 [k]
    svh: np.ndarray  # float16 [n]
    codebook: int

    @property
    def words(self) -> int:
        return self.trellis.shape[2]

    @property
    def in_features(self) -> int:
        return 16 * self.trellis.shape[0]

    @property
    def out_features(self) -> int:
        return 16 * self.trellis.shape[1]

    def slab(self) -> torch.Tensor:
        """The words in strip-major order, flat."""
        return torch.from_numpy(self.trellis).transpose(0, 1).contiguous().flatten()

    def inner(self) -> np.ndarray:
        """float16 [k, n], in the rotated domain."""
        name = reference_codec.CODEBOOKS[self.codebook]
        return reference_codec.inner_matrix(self.trellis, name)

    def weight(self) -> np.ndarray:
        """float64 [k, n], of `y = x @ weight`."""
        name = reference_codec.CODEBOOKS[self.codebook]
        return reference_codec.dense_weight(self.trellis, self.suh, self.svh, name)


def make_layer(
    rng: np.random.Generator, k: int, n: int, words: int, codebook: int
) -> Layer:
    """A matrix whose outputs have about the spread of its inputs."""

    def signs(size: int) -> np.ndarray:
        return rng.choice([-1.0, 1.0], size) * rng.uniform(0.5, 1.5, size)

    trellis = rng.integers(-(2**15), 2**15, (k // 16, n // 16, words), dtype=np.int16)
    return Layer(
        trellis,
        (signs(k) / np.sqrt(k)).astype(np.float16),
        signs(n).astype(np.float16),
        codebook,
    )


def linear_arguments(
    layers: Sequence[Layer], columns: Sequence[tuple[int, int]] | None = None
) -> dict:
    """trellis, suh, svh and shards of the `linear` op; columns are (skip, keep)."""
    if columns is None:
        columns = [(0, layer.out_features) for layer in layers]
    return {
        "trellis": torch.cat([layer.slab() for layer in layers]),
        "suh": torch.from_numpy(np.stack([layer.suh for layer in layers])),
        "svh": torch.from_numpy(np.concatenate([layer.svh for layer in layers])),
        "shards": [
            number
            for layer, (skip, keep) in zip(layers, columns)
            for number in (layer.out_features, skip, keep, layer.words, layer.codebook)
        ],
    }


def relative_error(got: torch.Tensor, wanted: np.ndarray) -> float:
    """Root mean square of the difference, over that of what was wanted."""
    error = got.double().numpy() - wanted
    return float(np.sqrt(np.mean(error**2) / np.mean(wanted**2)))


def error_bound(dtype: torch.dtype, exact: bool, chain: int = 1) -> float:
    """The relative error that `chain` products one after another may have.

    A sum of float32 products errs by less than 1e-6 for the sizes of the tests. The
    fast kernels do not round the weights to fp16 as the format does, which differs by
    2.3e-4, and hold activations in 16 bits, which adds 4e-5. The result is rounded to
    its dtype: a uniform error of half a unit in the last place.
    """
    inside = 2e-6 if exact else 3e-4
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 12**0.5
    return chain * inside + rounding
