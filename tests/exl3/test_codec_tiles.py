# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Packing, unpacking, and how a decoded matrix may be cut."""

import pytest
import torch

from exl3.codec import decode_weight, expand_signs
from exl3.codec.decode import effective_weight, inner_matrix
from exl3.codec.tiles import fresh_bits, pack_states, tile_states
from exl3.format.constants import HALF_RATE_WORDS, Codebook

ALL_WORDS = [*range(16, 129, 16), *HALF_RATE_WORDS]
#: Sums of a few hundred float64 terms in another order.
EXACT = {"rtol": 0, "atol": 1e-12}


def random_trellis(seed: int, k: int, n: int, words: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (k // 16, n // 16, words)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)


def random_scales(seed: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).half()


class Linear:
    """A random stored linear, its weight in float64, and its cuts."""

    def __init__(self, seed: int, k: int, n: int, words: int):
        self.trellis = random_trellis(seed, k, n, words)
        self.suh, self.svh = random_scales(seed + 1, k), random_scales(seed + 2, n)

    def weight(self) -> torch.Tensor:
        return decode_weight(
            self.trellis, self.suh, self.svh, Codebook.MUL1, torch.float64
        )

    def columns(self, first: int, last: int) -> "Linear":
        cut = Linear.__new__(Linear)
        cut.trellis = self.trellis[:, first // 16 : last // 16]
        cut.suh, cut.svh = self.suh, self.svh[first:last]
        return cut

    def rows(self, first: int, last: int) -> "Linear":
        cut = Linear.__new__(Linear)
        cut.trellis = self.trellis[first // 16 : last // 16]
        cut.suh, cut.svh = self.suh[first:last], self.svh
        return cut


@pytest.mark.parametrize("words", ALL_WORDS)
def test_any_words_are_a_tile_and_pack_again(words):
    packed = random_trellis(words, 16 * 10, 16 * 3, words)
    states = tile_states(packed)
    assert torch.equal(pack_states(states, words), packed)
    # Each state is the one before, moved along by its own fresh bits; the first
    # continues the last.
    fresh = fresh_bits(words)
    moved = states.roll(1, -1) << fresh & 0xFFFF
    assert torch.equal(states - (states & (1 << fresh) - 1), moved)


def test_states_of_counting_nibbles():
    # The worked example of the format: nibbles 0 1 2 ... 15, 0 1 ... at 4 bits.
    packed = torch.tensor([0x4567, 0x0123, 0xCDEF, 0x89AB] * 16).to(torch.int16)
    states = tile_states(packed)
    assert [hex(state) for state in states[:4]] == [
        "0xdef0",
        "0xef01",
        "0xf012",
        "0x123",
    ]


def test_packed_signs():
    packed = torch.tensor([0b1, 0b1000_0000_0000_0010 - 2**16], dtype=torch.int16)
    signs = expand_signs(packed)
    assert signs.dtype == torch.float16 and len(signs) == 32
    assert (signs == -1).nonzero().flatten().tolist() == [0, 17, 31]
    assert (signs.abs() == 1).all()


@pytest.mark.parametrize("words", [24, 48])
def test_column_cuts_concatenate(words):
    whole = Linear(words, 256, 512, words)
    # Uneven on purpose; any multiple of 128 will do.
    parts = [whole.columns(0, 128), whole.columns(128, 512)]
    joined = torch.cat([part.weight() for part in parts], 1)
    assert torch.allclose(joined, whole.weight(), **EXACT)


@pytest.mark.parametrize("words", [24, 48])
def test_row_cuts_sum_up(words):
    whole = Linear(words, 512, 256, words)
    x = torch.randn(3, 512, dtype=torch.float64)
    parts = [(0, 384), (384, 512)]
    total = sum(x[:, a:b] @ whole.rows(a, b).weight() for a, b in parts)
    scale = (x @ whole.weight()).abs().max()
    assert torch.allclose(total / scale, x @ whole.weight() / scale, **EXACT)


def test_a_cut_inside_a_block_is_another_matrix():
    whole = Linear(5, 256, 256, 48)
    inner = inner_matrix(whole.trellis, Codebook.MUL1).double()
    # The rotation spans 128 columns: no 64 of them decode without the others.
    zeroed = inner.clone()
    zeroed[:, 64:128] = 0
    half = effective_weight(zeroed, whole.suh, whole.svh)[:, :64]
    assert not torch.allclose(half, whole.weight()[:, :64], rtol=0, atol=0.1)


def expert(x, gate, up, down):
    """One routed expert of a token, in float64."""
    hidden = torch.nn.functional.silu(x @ gate.weight()) * (x @ up.weight())
    return hidden @ down.weight()


def make_slices(ranks: int) -> list[tuple[Linear, Linear, Linear]]:
    """Each rank's gate, up and down, with signs and scales of their own."""
    return [
        (
            Linear(100 * rank, 128, 256, 48),
            Linear(100 * rank + 10, 128, 256, 64),
            Linear(100 * rank + 20, 256, 128, 32),
        )
        for rank in range(ranks)
    ]


def test_slices_of_an_expert_sum_up_as_virtual_experts():
    x = torch.randn(4, 128, dtype=torch.float64)
    slices = make_slices(4)
    gate = torch.cat([part[0].weight() for part in slices], 1)
    up = torch.cat([part[1].weight() for part in slices], 1)
    down = torch.cat([part[2].weight() for part in slices], 0)
    whole = torch.nn.functional.silu(x @ gate) * (x @ up) @ down
    total = sum(expert(x, *part) for part in slices)
    assert torch.allclose(total / whole.abs().max(), whole / whole.abs().max(), **EXACT)


def test_a_slice_cut_again_sums_up():
    x = torch.randn(4, 128, dtype=torch.float64)
    ((gate, up, down),) = make_slices(1)
    whole = expert(x, gate, up, down)
    total = sum(
        expert(x, gate.columns(a, b), up.columns(a, b), down.rows(a, b))
        for a, b in [(0, 128), (128, 256)]
    )
    assert torch.allclose(total / whole.abs().max(), whole / whole.abs().max(), **EXACT)
