# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""An EXL3 decoder in numpy, written from the format and from nothing else.

It shares no code with `exl3.codec` or the kernels, so that all of them can be checked
against it. Each function does one step over all tiles at once; the last one gives the
dense weight that a stored linear stands for.
"""

from functools import cache

import numpy as np

CODEBOOKS = ("3inst", "mcg", "mul1")
#: The value that a codebook's marker tensor holds; 3inst has no marker.
MARKERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
#: Standard deviation of a codebook's values over its 65536 states.
SIGMA = {"3inst": 1.24371, "mcg": 1.24411, "mul1": 1.00031}


@cache
def codebook_values(codebook: str) -> np.ndarray:
    """The weight that each 16-bit state stands for: float16 [65536]."""
    if codebook == "mul1":
        product = _products(codebook)
        total = sum((product >> shift) & 0xFF for shift in (0, 8, 16, 24))
        scale, offset = _halves(0x1EEE), _halves(0xC931)
        # Rounded once: the product and sum of these are exact in float64.
        value = (1024.0 + total) * float(scale) + float(offset)
        return value.astype(np.float16)
    return unrounded_values(codebook).astype(np.float16)


@cache
def unrounded_values(codebook: str) -> np.ndarray:
    """What 3inst and mcg round: the sum of two float16 numbers, float64 [65536]."""
    product = (_products(codebook) & 0x8FFF8FFF) ^ 0x3B603B60
    low, high = _halves(product & 0xFFFF), _halves(product >> 16)
    return low.astype(np.float64) + high.astype(np.float64)


def _products(codebook: str) -> np.ndarray:
    """The hash of each state, uint32 [65536]."""
    state = np.arange(65536, dtype=np.uint64)
    if codebook == "3inst":
        product = state * 89226354 + 64248484
    else:
        product = state * MARKERS[codebook]
    return (product % 2**32).astype(np.uint32)


def _halves(bits) -> np.ndarray:
    return np.asarray(bits).astype(np.uint16).view(np.float16)


@cache
def tile_positions() -> np.ndarray:
    """Where weight t of a tile lies in its 16 x 16 rows and columns: int [256]."""
    t = np.arange(256)
    lane, j = t >> 3, t & 7
    row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
    column = (lane >> 2) + 8 * (j >> 2)
    return 16 * row + column


def trellis_states(words: np.ndarray) -> np.ndarray:
    """The state of every weight.

    Args:
        words: Stored tiles, uint16 [tiles, 16 * bits].

    Returns:
        uint16 [tiles, 256] in the order of the trellis.
    """
    count = words.shape[-1]  # 16-bit words of a ring, and 256 * bits ring bits
    # Twice the fresh bits of each weight: half rates alternate between two numbers.
    t = np.arange(256)
    whole, half = divmod(count, 16)
    fresh = np.full(256, whole) if not half else whole + (t % 2)
    start = (np.cumsum(fresh) - 16) % (16 * count)
    ring = words[:, np.arange(count) ^ 1].astype(np.uint32)
    first, bit = start // 16, (start % 16).astype(np.uint32)
    pair = (ring[:, first] << 16) | ring[:, (first + 1) % count]
    return (pair >> (16 - bit)).astype(np.uint16)


def inner_matrix(trellis: np.ndarray, codebook: str) -> np.ndarray:
    """The rotated matrix that a trellis stores.

    Args:
        trellis: int16 [k / 16, n / 16, 16 * bits].
        codebook: One of `CODEBOOKS`.

    Returns:
        float16 [k, n].
    """
    return _placed(trellis, codebook_values(codebook))


def _placed(trellis: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The matrix of a trellis whose states stand for these values."""
    rows, columns, count = trellis.shape
    states = trellis_states(trellis.reshape(-1, count).view(np.uint16))
    tiles = np.empty((rows * columns, 256), values.dtype)
    tiles[:, tile_positions()] = values[states]
    grid = tiles.reshape(rows, columns, 16, 16).transpose(0, 2, 1, 3)
    return grid.reshape(16 * rows, 16 * columns)


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotates every aligned block of 128 along the last axis by H / sqrt(128).

    H is the Sylvester-Hadamard matrix, whose element (i, j) is -1 to the number of
    bits that i and j have in common. Butterflies need no matrix, and no threads.
    """
    shape = x.shape
    for step in (1, 2, 4, 8, 16, 32, 64):
        pairs = x.reshape(-1, 2, step)
        low, high = pairs[:, 0], pairs[:, 1]
        x = np.stack([low + high, low - high], axis=1)
    return x.reshape(shape) / np.sqrt(128)


def dense_weight(
    trellis: np.ndarray,
    suh: np.ndarray,
    svh: np.ndarray,
    codebook: str,
    values: np.ndarray | None = None,
) -> np.ndarray:
    """The weight W of `y = x @ W` that a stored linear stands for.

    Args:
        trellis: int16 [k / 16, n / 16, 16 * bits].
        suh: float16 [k].
        svh: float16 [n].
        codebook: One of `CODEBOOKS`.
        values: What the states stand for, if not the codebook's values.

    Returns:
        float64 [k, n].
    """
    if values is None:
        values = codebook_values(codebook)
    inner = _placed(trellis, values).astype(np.float64)
    inner = rotate(rotate(inner).T).T
    return suh.astype(np.float64)[:, None] * inner * svh.astype(np.float64)
