# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a user asks for: the bits of each kind of weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief  # a hostile value must not fill the screen

from exl3.checkpoint.json_files import read_json
from exl3.format.constants import MAX_BITS, TILE, Codebook, is_legal_rate
from exl3.format.metadata import UNQUANTIZED_BITS
from exl3.tools.quantize.metadata import BITS_MAP_FIELD
from exl3.tools.shared.errors import ToolError

Bits = int | float
#: Of `lm_head` in plain EXL3, as other writers have it.
HEAD_BITS = 6


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is encoded. 16 bits: the weights stay as they are.

    Attributes:
        bits: Of the routed experts of the decoder layers; if it is no whole number,
            their mean. Without a map, and in a model without routed experts, of all
            linear layers.
        attn_bits: Of attention, dense layers and shared experts, also in MTP layers.
        head_bits: Of `lm_head`.
        mtp_bits: Of the routed experts of the MTP layers; 16 leaves these layers
            altogether as they are.
        codebook: The trellis's codebook.
        bits_map: Bits of every routed expert, by global layer index.
        ranks: Slices of each routed expert; None for plain EXL3.
        dense: Patterns of names of modules that stay as they are.
    """

    bits: Bits
    attn_bits: Bits
    head_bits: Bits
    mtp_bits: Bits
    codebook: Codebook
    bits_map: Mapping[int, tuple[Bits, ...]] | None = None
    ranks: int | None = None
    dense: tuple[str, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """Whether experts get different bits, by how much their errors matter."""
        return self.bits_map is None and self.bits != int(self.bits)

    @classmethod
    def make(
        cls,
        *,
        bits: Bits | None,
        bits_map: Mapping[int, tuple[Bits, ...]] | None = None,
        attn_bits: Bits | None = None,
        head_bits: Bits | None = None,
        mtp_bits: Bits | None = None,
        codebook: Codebook | None = None,
        ranks: int | None = None,
        dense: tuple[str, ...] = (),
    ) -> "Recipe":
        """Fills in what was not asked for.

        Raises:
            ToolError: There is no such rate, or the arguments exclude each other.
        """
        if (bits is None) == (bits_map is None):
            raise ToolError("--bits, --bits-map: give one of the two")
        if ranks is not None and codebook not in (None, Codebook.MCG):
            raise ToolError(
                f"--codebook {codebook.label}: rank-sliced experts are always mcg; "
                "leave it out, or make a plain pack"
            )
        if codebook is None:
            codebook = Codebook.MUL1 if ranks is None else Codebook.MCG
        if bits_map is not None:
            rates = [rate for row in bits_map.values() for rate in row]
            for rate in rates:
                _check_rate("--bits-map", rate, codebook, ranks)
            bits = sum(rates) / len(rates)
            lowest: Bits = min(rates)
        else:
            assert bits is not None
            if not 1 <= bits <= MAX_BITS:
                raise ToolError(f"--bits {bits}: expected 1 to {MAX_BITS}")
            lowest = math.floor(bits)
        found = cls(
            bits=bits,
            attn_bits=_default(attn_bits, math.ceil(bits), ranks),
            head_bits=_default(head_bits, HEAD_BITS, ranks),
            mtp_bits=lowest if mtp_bits is None else mtp_bits,
            codebook=codebook,
            bits_map=bits_map,
            ranks=ranks,
            dense=dense,
        )
        for option in ("attn_bits", "head_bits", "mtp_bits"):
            rate = getattr(found, option)
            if rate != UNQUANTIZED_BITS:
                name = f"--{option.replace('_', '-')}"
                sliced = ranks if option == "mtp_bits" else None
                _check_rate(name, rate, codebook, sliced)
        return found


def _default(bits: Bits | None, plain: Bits, ranks: int | None) -> Bits:
    """Beside rank-sliced experts all is dense, unless it is asked for."""
    if bits is not None:
        return bits
    return plain if ranks is None else UNQUANTIZED_BITS


def _check_rate(option: str, bits: Bits, codebook: Codebook, ranks: int | None) -> None:
    words = bits * TILE
    is_whole = words == int(words) and (ranks is None or bits == int(bits))
    if not is_whole or not is_legal_rate(int(words), codebook):
        half = " or 1.5, 2.5 or 3.5" if codebook is Codebook.MUL1 else ""
        half = half if ranks is None else ""
        raise ToolError(
            f"{option}: {bits} bits do not exist with {codebook.label}; choose 1 to "
            f"{MAX_BITS}{half}"
        )


def read_bits_map(text: str) -> dict[int, tuple[Bits, ...]]:
    """Reads the bits of every routed expert.

    Args:
        text: The name of a JSON file such as `{"3": {"k": [3, 4, 3]}}`, by layer index.
            After the last colon another field may be named, as `hybrid_tr3_tail` does.

    Raises:
        CheckpointError: It is no JSON file.
        ToolError: It is malformed.
    """
    file, colon, field = text.rpartition(":")
    if not colon or Path(text).exists():
        file, field = text, BITS_MAP_FIELD
    content = read_json(Path(file))
    if not isinstance(content, Mapping) or not content:
        raise ToolError(
            f"{file}: is {brief(content)}; expected an object by layer, such as "
            f'{{"3": {{"{field}": [3, 4, 3]}}}}'
        )
    found = {}
    for key, entry in content.items():
        row = entry.get(field) if isinstance(entry, Mapping) else None
        is_layer = len(key) <= 6 and key.isdecimal() and key == str(int(key))
        if not is_layer or not isinstance(row, list) or not row:
            raise ToolError(
                f"{file}: layer {brief(key)} has {brief(entry)}; expected an object "
                f"with a list {field!r} that has the bits of each routed expert"
            )
        for expert, bits in enumerate(row):
            if type(bits) not in (int, float) or not 1 <= bits <= MAX_BITS:
                raise ToolError(
                    f"{file}: layer {key} gives expert {expert} {brief(bits)} bits; "
                    f"expected 1 to {MAX_BITS}"
                )
        found[int(key)] = tuple(row)
    return found
