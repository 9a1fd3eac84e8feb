# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The numbers of the EXL3 format."""

from enum import IntEnum

#: Rows and columns of the square of weights that the trellis codes at a time.
TILE = 16
#: Features that are rotated together, on both sides of a matrix.
HADAMARD = 128
#: Rates in bits per weight are 1 to 8; `words` is 16 times as many.
MAX_BITS = 8
#: int16 words of a tile at 1.5, 2.5 and 3.5 bits per weight, which mul1 alone has.
HALF_RATE_WORDS = (24, 40, 56)


class Codebook(IntEnum):
    """How the 16 bits of a trellis state become a weight. Ops take the number."""

    INST3 = 0  # "3inst": no marker tensor
    MCG = 1
    MUL1 = 2

    @property
    def label(self) -> str:
        """The codebook's name in metadata."""
        return "3inst" if self is Codebook.INST3 else self.name.lower()


#: The 32-bit multiplier of a codebook, which its marker tensor holds as an int32.
MULTIPLIERS = {Codebook.MCG: 0xCBAC1FED, Codebook.MUL1: 0x83DCD12D}
#: The codebook that a name in metadata means.
CODEBOOKS = {codebook.label: codebook for codebook in Codebook}


def is_legal_rate(words: int, codebook: Codebook) -> bool:
    """Whether a tile of this many int16 words exists with this codebook."""
    if words in HALF_RATE_WORDS:
        return codebook is Codebook.MUL1
    return words % TILE == 0 and 1 <= words // TILE <= MAX_BITS


def bits_of(words: int) -> int | float:
    """Bits per weight of a tile of int16 words: 3, or 2.5."""
    return words // TILE if words % TILE == 0 else words / TILE


def padded(features: int) -> int:
    """Features as stored: filled up to whole Hadamard blocks."""
    return -(-features // HADAMARD) * HADAMARD
