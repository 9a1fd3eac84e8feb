# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The tests' own decoder gives the golden vectors, bit for bit.

What it says is what packs are compared with, so it is checked by itself.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests import reference_codec

GOLDEN = json.loads(Path(__file__).with_name("golden_vectors.json").read_text())


def words(seed, count):
    """The generator that the vectors were made with: the top halves of an LCG."""
    drawn = np.empty(count, np.uint16)
    for i in range(count):
        seed = (seed * 1664525 + 1013904223) % 2**32
        drawn[i] = seed >> 16
    return drawn


def sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("codebook", reference_codec.CODEBOOKS)
def test_codebooks(codebook):
    golden = GOLDEN["codebook_tables"][codebook]
    values = reference_codec.codebook_values(codebook)
    assert sha256(values) == golden["sha256"]
    sigma = reference_codec.SIGMA[codebook]
    assert values.astype(np.float64).std() == pytest.approx(sigma, abs=1e-5)


def test_positions():
    assert reference_codec.tile_positions().tolist() == GOLDEN["position_to_rowmajor"]


@pytest.mark.parametrize(
    "golden", GOLDEN["tiles"], ids=lambda tile: f"{tile['codebook']}-{tile['K']}"
)
def test_tiles(golden):
    tile = words(golden["seed"], int(16 * golden["K"]))
    assert sha256(tile) == golden["packed_sha256"]
    states = reference_codec.trellis_states(tile[None])
    assert sha256(states) == golden["states_sha256"]
    trellis = tile.view(np.int16)[None, None]
    decoded = reference_codec.inner_matrix(trellis, golden["codebook"])
    assert sha256(decoded) == golden["tile_sha256"]


def test_a_whole_linear():
    golden = GOLDEN["linear_128"]
    trellis = words(777, 64 * 48).view(np.int16).reshape(8, 8, 48)
    suh = (words(778, 128) / 65536 * 0.02 - 0.01).astype(np.float16)
    svh = (words(779, 128) / 65536 * 2 - 1).astype(np.float16)
    x = (words(780, 128) / 65536 * 2 - 1).astype(np.float16)
    weight = reference_codec.dense_weight(trellis, suh, svh, "mcg")
    y = x.astype(np.float64) @ weight
    np.testing.assert_allclose(y[:8], golden["y_first8_float64"], atol=1e-15)
    assert abs(y).sum() == pytest.approx(golden["y_sum_abs"], rel=1e-12)
