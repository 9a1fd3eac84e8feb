# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The torch decoder against the format's test vectors, bit for bit."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from exl3.codec import decode_weight, inner_matrix
from exl3.codec.hadamard import hadamard_matrix
from exl3.codec.tiles import (
    codebook_values,
    decode_tiles,
    pack_states,
    tile_positions,
    tile_states,
)
from exl3.format.constants import CODEBOOKS, HADAMARD, Codebook

GOLDEN = json.loads(Path(__file__).with_name("golden_vectors.json").read_text())


def words(seed: int, count: int) -> np.ndarray:
    """The generator that the vectors were made with."""
    result = np.empty(count, np.uint16)
    state = seed
    for i in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        result[i] = state >> 16
    return result


def stored(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int16).copy())


def sha256(tensor: torch.Tensor, dtype: str) -> str:
    return hashlib.sha256(tensor.numpy().astype(dtype).tobytes()).hexdigest()


def hexadecimal(values: torch.Tensor) -> list[str]:
    return [f"{bits & 0xFFFF:04x}" for bits in values.half().view(torch.int16).tolist()]


@pytest.mark.parametrize("name", list(CODEBOOKS))
def test_every_value_of_a_codebook(name):
    expected = GOLDEN["codebook_tables"][name]
    values = codebook_values(CODEBOOKS[name])
    assert hexadecimal(values[:8]) == expected["first8_hex"]
    assert sha256(values, "<f2") == expected["sha256"]
    assert torch.equal(values, values.half().float())
    # The statistics that the encoder's scale rests on.
    assert values.double().mean().item() == pytest.approx(expected["mean"], rel=1e-12)
    deviation = values.double().std(correction=0).item()
    assert deviation == pytest.approx(expected["std"], rel=1e-12)
    assert (values.min(), values.max()) == (expected["min"], expected["max"])
    assert len(values.unique()) == expected["distinct"]


def test_positions():
    assert tile_positions().tolist() == GOLDEN["position_to_rowmajor"]


@pytest.mark.parametrize(
    "vector", GOLDEN["tiles"], ids=lambda vector: f"{vector['codebook']}-{vector['K']}"
)
def test_tile(vector):
    packed = stored(words(vector["seed"], int(16 * vector["K"])))
    assert sha256(packed, "<i2") == vector["packed_sha256"]
    states = tile_states(packed)
    assert states[:8].tolist() == vector["states_first8"]
    assert sha256(states, "<u2") == vector["states_sha256"]
    codebook = CODEBOOKS[vector["codebook"]]
    in_order = codebook_values(codebook)[states[:8]]
    assert hexadecimal(in_order) == vector["trellis_order_first8_hex"]
    tile = decode_tiles(packed, codebook)
    assert tile.flatten()[:8].tolist() == vector["tile_first8"]
    assert hexadecimal(tile.flatten()[:8]) == vector["tile_first8_hex"]
    assert sha256(tile, "<f2") == vector["tile_sha256"]
    assert torch.equal(pack_states(states, len(packed)), packed)


def test_vectors_cover_every_rate():
    covered = {(vector["codebook"], vector["K"]) for vector in GOLDEN["tiles"]}
    whole = {(name, bits) for name in CODEBOOKS for bits in range(1, 9)}
    assert covered == whole | {("mul1", bits) for bits in (1.5, 2.5, 3.5)}


def test_rotation():
    matrix = hadamard_matrix(torch.float64)
    signs = (matrix[1, :8] * HADAMARD**0.5).round().tolist()
    assert signs == GOLDEN["hadamard_row1_first8"]
    odd = [[(i & j).bit_count() % 2 for j in range(HADAMARD)] for i in range(HADAMARD)]
    assert torch.equal(matrix < 0, torch.tensor(odd) == 1)
    assert torch.allclose(matrix @ matrix, torch.eye(HADAMARD).double(), atol=1e-14)


def test_linear():
    vector = GOLDEN["linear_128"]
    trellis = stored(words(777, 8 * 8 * 48)).view(8, 8, 48)
    suh, svh, x = (
        torch.from_numpy(words(seed, 128) / 65536 * slope - offset).half()
        for seed, slope, offset in ((778, 0.02, 0.01), (779, 2, 1), (780, 2, 1))
    )
    inner = inner_matrix(trellis, Codebook.MCG)
    assert sha256(inner, "<f2") == vector["inner_sha256"]
    weight = decode_weight(trellis, suh, svh, Codebook.MCG, torch.float64)
    y = x.double() @ weight
    expected = torch.tensor(vector["y_first8_float64"], dtype=torch.float64)
    # Products of 128 float64 terms of RMS 0.01: a few hundred times 1e-16 of that.
    assert torch.allclose(y[:8], expected, rtol=1e-12, atol=1e-15)
    assert y.abs().sum().item() == pytest.approx(vector["y_sum_abs"], rel=1e-12)
