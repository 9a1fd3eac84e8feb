# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The metadata of a rank-sliced checkpoint: `hybrid_tr3_tail` in `config.json`.

Nothing is guessed: what is missing, malformed or unknown is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as brief  # a hostile value must not fill the log
from typing import Any

from exl3.format.constants import MAX_BITS, Codebook
from exl3.format.errors import MetadataError, UnsupportedFormatError
from exl3.format.metadata import check_multiplier, parse_codebook

TAIL = "hybrid_tr3_tail"
TAIL_FORMAT = "exl3-trellis"
#: Format tags, compared literally. Real names may have another prefix.
TENSOR_SCHEMA = "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}"
SHARED_H_SCHEMA = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"
PER_EXPERT_LAYOUT = "per_expert_v1"
SHARED_H_LAYOUT = "shared_h_v1"

MAX_RANKS = 1024
_MAX_LAYERS = 100_000
_SIBLING_PROFILE = "exl3-msrt-base/1"


@dataclass(frozen=True)
class Tail:
    """What `hybrid_tr3_tail` says."""

    ranks: int  # slices of each expert: `tp`
    layers: range  # layers with rank-sliced experts
    experts: int | Mapping[int, int]  # in every layer, or by global layer index
    shared_h: bool  # hidden-side vectors are stored once for all experts
    bits: int | None  # of every expert, or None
    bits_by_layer: Mapping[int, int] | None
    bits_file: str | None  # has the bits of each expert, in this field of each layer
    bits_field: str | None
    k_values: frozenset[int]  # bits that occur; empty if not stated

    def width(self, layer: int) -> int | None:
        """Routed experts of a layer, or None if nothing is said of it."""
        if isinstance(self.experts, int):
            return self.experts
        return self.experts.get(layer)

    @classmethod
    def parse(cls, tail: object, where: str) -> "Tail":
        """Checks the metadata.

        Args:
            tail: The value of `hybrid_tr3_tail`, as parsed from JSON.
            where: File and field, for a refusal.

        Raises:
            MetadataError: A field is missing, malformed or contradicts another.
            UnsupportedFormatError: The metadata belongs to another format.
        """
        fields = _Fields(tail, where)
        fields.refuse_other_formats()
        fields.literal("tensor_schema", TENSOR_SCHEMA)
        ranks = fields.count("tp", 1, MAX_RANKS)
        layers = fields.layers()
        experts = fields.experts()
        fields.refuse_partial(experts)
        shared_h = fields.shared_h()
        by_layer = fields.bits_by_layer(layers)
        bits, file, field, k_values = None, None, None, frozenset[int]()
        if by_layer is None:
            bits = fields.bits()
            if bits is None:
                k_values = fields.k_values()
                file, field = fields.bits_file()
        elif isinstance(fields.get("bits"), str):
            raise fields.error("bits", "a number beside trellis_bits_by_layer")
        return cls(
            ranks=ranks,
            layers=layers,
            experts=experts,
            shared_h=shared_h,
            bits=bits,
            bits_by_layer=by_layer,
            bits_file=file,
            bits_field=field,
            k_values=k_values,
        )


class _Fields:
    """Reads the fields, each with its own rule."""

    def __init__(self, tail: object, where: str):
        if not isinstance(tail, Mapping):
            raise MetadataError(f"{where} is {brief(tail)}; expected an object")
        self._tail: Mapping[str, Any] = tail
        self._where = where

    def get(self, field: str) -> Any:
        return self._tail.get(field)

    def error(self, field: str, expected: str) -> MetadataError:
        if field not in self._tail:
            return MetadataError(
                f"{self._where} has no {field}; expected {expected}: convert the "
                "checkpoint again, or add the field"
            )
        return MetadataError(
            f"{self._where}.{field} is {brief(self._tail[field])}; expected {expected}"
        )

    def count(self, field: str, low: int, high: int) -> int:
        value = self.get(field)
        if type(value) is not int or not low <= value <= high:
            raise self.error(field, f"an integer from {low} to {high}")
        return value

    def literal(self, field: str, expected: str) -> None:
        if self.get(field) != expected:
            raise self.error(field, repr(expected))

    def refuse_other_formats(self) -> None:
        if self.get("runtime_profile") == _SIBLING_PROFILE:
            raise UnsupportedFormatError(
                f"{self._where}.runtime_profile is {_SIBLING_PROFILE!r}, a format that "
                "resembles rank-sliced EXL3 and is not supported; convert the model to "
                "plain or rank-sliced EXL3"
            )
        self.literal("format", TAIL_FORMAT)
        codebook = parse_codebook(self.get("codebook"), f"{self._where}.codebook")
        if codebook is not Codebook.MCG:
            raise self.error("codebook", "'mcg', the only one of this format")
        where = f"{self._where}.mcg_multiplier"
        check_multiplier(self.get("mcg_multiplier"), Codebook.MCG, where)

    def refuse_partial(self, experts: int | Mapping[int, int]) -> None:
        """Early hybrids kept some experts of a layer in NVFP4."""
        if self.get("nvfp4_keep_per_layer") not in (None, 0):
            raise UnsupportedFormatError(
                f"{self._where}.nvfp4_keep_per_layer is "
                f"{brief(self.get('nvfp4_keep_per_layer'))}: some experts are NVFP4 "
                "beside EXL3 ones, which is not supported; convert all of them to EXL3"
            )
        stated = self.get("tr3_tail_per_layer")
        if stated is not None and isinstance(experts, int) and stated != experts:
            raise self.error(
                "tr3_tail_per_layer", f"{experts}, as experts_per_layer is: all experts"
            )

    def layers(self) -> range:
        value = self.get("moe_layers")
        if (
            not isinstance(value, list)
            or len(value) != 2
            or any(type(layer) is not int for layer in value)
            or not 0 <= value[0] <= value[1] < _MAX_LAYERS
        ):
            raise self.error("moe_layers", "[first layer, last layer]")
        return range(value[0], value[1] + 1)

    def experts(self) -> int | Mapping[int, int]:
        value = self.get("experts_per_layer")
        expected = "a count, or a list of counts by layer index with 0 for dense layers"
        if type(value) is int and value > 0:
            return value
        if isinstance(value, list):
            by_layer = dict(enumerate(value))
        elif isinstance(value, Mapping) and all(map(_is_index, value)):
            by_layer = {int(layer): count for layer, count in value.items()}
        else:
            raise self.error("experts_per_layer", expected)
        # Pruners leave null where a layer has no experts.
        by_layer = {
            layer: 0 if count is None else count for layer, count in by_layer.items()
        }
        if any(type(count) is not int or count < 0 for count in by_layer.values()):
            raise self.error("experts_per_layer", expected)
        return by_layer

    def shared_h(self) -> bool:
        layout = self._tail.get("rotation_layout", PER_EXPERT_LAYOUT)
        if layout not in (PER_EXPERT_LAYOUT, SHARED_H_LAYOUT):
            raise self.error(
                "rotation_layout", f"{PER_EXPERT_LAYOUT!r} or {SHARED_H_LAYOUT!r}"
            )
        if layout == SHARED_H_LAYOUT:
            self.literal("shared_h_tensor_schema", SHARED_H_SCHEMA)
        elif self.get("shared_h_tensor_schema") is not None:
            raise MetadataError(
                f"{self._where}.shared_h_tensor_schema is set, but rotation_layout is "
                f"{layout!r}; set rotation_layout to {SHARED_H_LAYOUT!r}, or remove "
                "the schema"
            )
        return layout == SHARED_H_LAYOUT

    def bits(self) -> int | None:
        """Bits of all experts, or None if they are mixed."""
        value = self.get("bits")
        if isinstance(value, str) and value.lower() == "mixed":
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or value not in range(1, MAX_BITS + 1):
            raise self.error("bits", f'an integer from 1 to {MAX_BITS}, or "mixed"')
        return int(value)

    def k_values(self) -> frozenset[int]:
        value = self.get("k_values")
        if (
            not isinstance(value, list)
            or not value
            or any(type(k) is not int or not 1 <= k <= MAX_BITS for k in value)
        ):
            raise self.error("k_values", f"a list of integers from 1 to {MAX_BITS}")
        return frozenset(value)

    def bits_file(self) -> tuple[str, str]:
        value = self.get("bits_per_expert")
        text = value if isinstance(value, str) and value.isprintable() else ""
        found = re.fullmatch(r"([^/\\:]{1,200}):([^:]{1,200})", text)
        if found is None or found[1] in (".", ".."):
            raise self.error(
                "bits_per_expert", "'file.json:field', the file in the same folder"
            )
        return found[1], found[2]

    def bits_by_layer(self, layers: range) -> Mapping[int, int] | None:
        value = self.get("trellis_bits_by_layer")
        if value is None:
            return None
        if (
            not isinstance(value, Mapping)
            or not all(map(_is_index, value))
            or {int(layer) for layer in value} != set(layers)
            or any(type(k) is not int or not 1 <= k <= MAX_BITS for k in value.values())
        ):
            raise self.error(
                "trellis_bits_by_layer",
                f"an integer from 1 to {MAX_BITS} for each of the layers {layers[0]} "
                f"to {layers[-1]}",
            )
        return {int(layer): k for layer, k in value.items()}


def _is_index(key: object) -> bool:
    return isinstance(key, str) and re.fullmatch("[0-9]{1,6}", key) is not None
