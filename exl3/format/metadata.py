# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The `quantization_config` of an EXL3 checkpoint.

`config.json` holds it, and `quantization_config.json` holds it again beside a list of
the tensors. Nothing in it is needed to decode: a wrong value shows that the checkpoint
is not what it claims to be, so what can be told wrong is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as brief  # a hostile value must not fill the log
from typing import Any

from exl3.format.constants import CODEBOOKS, MULTIPLIERS, Codebook
from exl3.format.errors import MetadataError, UnsupportedFormatError

QUANT_METHOD = "exl3"
#: Bits that stand for a module in 16 bits.
UNQUANTIZED_BITS = 16
#: Blocks and values of formats that resemble EXL3.
_SIBLING_BLOCK = "r7_routed_experts"
_SIBLING_SCOPE = "glm53_routed_experts_only"


@dataclass(frozen=True)
class QuantizationConfig:
    """What a `quantization_config` says. None where it does not."""

    bits: float | None = None  # the average that the writer aimed at; None if mixed
    head_bits: float | None = None
    codebook: Codebook | None = None

    @classmethod
    def parse(cls, block: Mapping[str, Any], where: str) -> "QuantizationConfig":
        """Checks a block whose `quant_method` is exl3.

        Args:
            block: The block as parsed from JSON.
            where: File and field, for a refusal.

        Raises:
            MetadataError: A field is malformed.
            UnsupportedFormatError: The block belongs to another format.
        """
        refuse_siblings(block, where)
        bits = block.get("bits")
        if isinstance(bits, str) and bits.lower() == "mixed":
            bits = None
        for field in ("mtp_bits", "vision_bits"):
            _number(block.get(field), f"{where}.{field}")
        _check_multipliers(block, where)
        options = block.get("experimental_options")
        if options is not None:
            _check_multipliers(_object(options, where, "experimental_options"), where)
        return cls(
            bits=_number(bits, f"{where}.bits"),
            head_bits=_number(block.get("head_bits"), f"{where}.head_bits"),
            codebook=parse_codebook(block.get("codebook"), f"{where}.codebook"),
        )


def parse_codebook(name: object, where: str) -> Codebook | None:
    """The codebook that metadata names, or None if it names none.

    Raises:
        UnsupportedFormatError: It is none of EXL3's.
    """
    if name is None:
        return None
    codebook = CODEBOOKS.get(name.lower()) if isinstance(name, str) else None
    if codebook is None:
        raise UnsupportedFormatError(
            f"{where} is {brief(name)}; EXL3 has {', '.join(CODEBOOKS)}, and formats "
            "with other codebooks are not supported: convert the model to EXL3"
        )
    return codebook


def refuse_siblings(block: Mapping[str, Any], where: str) -> None:
    """Refuses blocks of formats that store trellis tensors in another way.

    Raises:
        UnsupportedFormatError: The block belongs to such a format.
    """
    found = None
    if _SIBLING_BLOCK in block:
        found = _SIBLING_BLOCK
    elif block.get("scope") == _SIBLING_SCOPE:
        found = f"scope {_SIBLING_SCOPE!r}"
    if found is not None:
        raise UnsupportedFormatError(
            f"{where} has {found}, a format that resembles EXL3 and is not supported; "
            "convert the model to plain or rank-sliced EXL3"
        )


def check_multiplier(value: object, codebook: Codebook, where: str) -> None:
    """Refuses a multiplier other than the one that decoders use.

    Early writers let a user choose it, and stored what was chosen.

    Args:
        value: As an unsigned or signed 32-bit integer; None if it is not stated.
        codebook: The codebook that it belongs to.
        where: The field or tensor, for the refusal.

    Raises:
        UnsupportedFormatError: It is another one.
    """
    expected = MULTIPLIERS[codebook]
    if value is None or (type(value) is int and value in (expected, expected - 2**32)):
        return
    raise UnsupportedFormatError(
        f"{where} is {brief(value)}; {codebook.label} has {expected}, and experimental "
        "multipliers are not supported: convert the model again"
    )


def _check_multipliers(block: Mapping[str, Any], where: str) -> None:
    for codebook in MULTIPLIERS:
        field = f"{codebook.label}_multiplier"
        check_multiplier(block.get(field), codebook, f"{where}.{field}")


def _number(value: object, where: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= UNQUANTIZED_BITS:  # type: ignore[operator]
        raise MetadataError(
            f"{where} is {brief(value)}; expected bits per weight from 1 to 8, or "
            f"{UNQUANTIZED_BITS} for a part that is not quantized"
        )
    return value  # type: ignore[return-value]


def _object(value: object, where: str, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MetadataError(f"{where}.{field} is {brief(value)}; expected an object")
    return value
