# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""One tile: 256 weights as a ring of bits. csrc/exl3/codec has the same in C++."""

from functools import cache

import torch
from torch import Tensor

from exl3.format.constants import MULTIPLIERS, TILE, Codebook

TILE_WEIGHTS = TILE * TILE
STATE_BITS = 16
#: Slope and offset of mul1's line from a sum of bytes to a value, as fp16 has them.
_MUL1_SLOPE = 1774 * 2**-18  # 0x1EEE
_MUL1_OFFSET = -1329 * 2**-7  # 0xC931


@cache
def codebook_values(codebook: Codebook) -> Tensor:
    """The value of every state, float32 `[65536]`; each is an fp16 number."""
    states = torch.arange(1 << STATE_BITS)
    if codebook is Codebook.INST3:
        hashes = states * 89226354 + 64248484
    else:
        hashes = states * MULTIPLIERS[codebook]
    hashes &= 0xFFFFFFFF
    if codebook is Codebook.MUL1:
        total = sum(hashes >> shift & 0xFF for shift in (0, 8, 16, 24))
        values = (1024 + total).double() * _MUL1_SLOPE + _MUL1_OFFSET
    else:
        bits = hashes & 0x8FFF8FFF ^ 0x3B603B60
        halves = (bits & 0xFFFF, bits >> 16)
        low, high = (half.to(torch.int16).view(torch.float16) for half in halves)
        values = low.double() + high.double()
    # Up to here exact; a tile's weight is the sum or the line, rounded once.
    return values.half().float()


def fresh_bits(words: int) -> Tensor:
    """The bits that each weight adds to the ring, in trellis order: int64 `[256]`.

    Half rates add half a bit less at even weights, and half a bit more at odd ones.
    """
    return (words // 8 + torch.arange(TILE_WEIGHTS) % 2) // 2


@cache
def tile_positions() -> Tensor:
    """Row-major index in the tile, `16 * row + column`, of each weight: `[256]`.

    Trellis order is the order in which a GPU's lanes hold two operands of
    `mma.m16n8k16`: eight weights a lane.
    """
    weight = torch.arange(TILE_WEIGHTS)
    lane, register = weight // 8, weight % 8
    row = 2 * (lane % 4) + register % 2 + 8 * (register // 2 % 2)
    column = lane // 4 + 8 * (register // 4)
    return TILE * row + column


def tile_states(packed: Tensor) -> Tensor:
    """The states of packed tiles.

    The words of each pair are swapped, and read with the most significant bit first.
    A state is the 16 bits of the ring that end with the weight's own.

    Args:
        packed: int16 `[..., words]`.

    Returns:
        int64 `[..., 256]`, in trellis order.
    """
    words = packed.shape[-1]
    ring = packed.long().unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    shifts = torch.arange(15, -1, -1)
    bits = (ring.unsqueeze(-1) >> shifts & 1).flatten(-2)
    ends = fresh_bits(words).cumsum(0)
    window = ends.unsqueeze(-1) + torch.arange(-STATE_BITS, 0)
    return (bits[..., window % (STATE_BITS * words)] << shifts).sum(-1)


def pack_states(states: Tensor, words: int) -> Tensor:
    """Packs the fresh bits of states.

    Args:
        states: int64 `[..., 256]`, in trellis order; each continues the one before, and
            the first the last.
        words: int16 words of a tile.

    Returns:
        int16 `[..., words]`, of which `tile_states` gives the states back.
    """
    fresh = fresh_bits(words)
    # Ring bit i belongs to the weight whose own bits are the first to end after i.
    ends = fresh.cumsum(0)
    position = torch.arange(STATE_BITS * words)
    owner = torch.searchsorted(ends, position, right=True)
    bits = states[..., owner] >> (ends[owner] - 1 - position) & 1
    ring = (bits.unflatten(-1, (-1, 16)) << torch.arange(15, -1, -1)).sum(-1)
    swapped = ring.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return swapped.to(torch.int16)


def decode_tiles(packed: Tensor, codebook: Codebook) -> Tensor:
    """The weights of packed tiles `[..., words]`: float32 `[..., 16, 16]`."""
    values = codebook_values(codebook)[tile_states(packed)]
    tiles = torch.empty_like(values)
    tiles[..., tile_positions()] = values
    return tiles.unflatten(-1, (TILE, TILE))
