# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What is stored of each layer."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from exl3.checkpoint.experts import ExpertLayer, Slice
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.plan import Survey
from exl3.format.names import STACKS, layer_of

#: Fields of modules that may be left beside EXL3 ones.
_MAY_BE_SUPERSEDED = frozenset({"weight", *STACKS})


@dataclass
class Layer:
    """One layer, or what belongs to no layer."""

    layer: int | None  # global index
    kind: str  # "dense", "MoE", "MTP" or "other"
    width: int = 0  # routed experts
    experts: Counter[str] = field(default_factory=Counter)  # by bits, or "BF16"
    linears: Counter[str] = field(default_factory=Counter)  # EXL3 ones, by bits
    codebooks: set[str] = field(default_factory=set)
    storage: str = ""  # of the experts
    exl3_bytes: int = 0
    dense_bytes: int = 0
    superseded_bytes: int = 0  # dense weights that a trellis took the place of
    weights: int = 0  # of the EXL3 matrices, padding included
    code_bits: int = 0  # of their trellises
    expert_weights: int = 0  # the experts' part of both
    expert_code_bits: int = 0

    def add_code(self, weights: int, words: int) -> None:
        """Counts matrices of so many weights whose tiles have so many int16 words."""
        self.weights += weights
        self.code_bits += weights * words // 16

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        fields = dict(vars(self))
        for name in ("experts", "linears"):
            fields[name] = dict(sorted(fields[name].items()))
        fields["codebooks"] = sorted(fields["codebooks"])
        fields["bits_per_weight"] = mean_bits(self.code_bits, self.weights)
        fields["expert_bits_per_weight"] = mean_bits(
            self.expert_code_bits, self.expert_weights
        )
        for name in ("weights", "code_bits", "expert_weights", "expert_code_bits"):
            del fields[name]
        return fields


def mean_bits(code_bits: int, weights: int) -> float | None:
    """Bits per weight, or None of nothing."""
    return round(code_bits / weights, 4) if weights else None


def list_layers(found: Survey, num_layers: int) -> list[Layer]:
    """What is stored of each layer, in order; what belongs to no layer comes last.

    Args:
        found: What is stored.
        num_layers: Decoder layers.
    """
    plan, modules = found.checkpoint.plan, found.modules
    layers: dict[int | None, Layer] = {}

    def of(module: str) -> Layer:
        index = layer_of(module, num_layers)
        if index not in layers:
            kind = "other" if index is None else "dense"
            is_draft = index is not None and index >= num_layers
            layers[index] = Layer(index, "MTP" if is_draft else kind)
        return layers[index]

    sizes = _Sizes()

    def held(layer: Layer, fields: Mapping[str, TensorHeader]) -> int:
        """Bytes of a module's tensors that are loaded; the others are counted apart."""
        if not _MAY_BE_SUPERSEDED.isdisjoint(fields):
            left = {
                name: header
                for name, header in fields.items()
                if plan.is_superseded(header.name)
            }
            layer.superseded_bytes += sizes.of(left)
            fields = {name: fields[name] for name in fields if name not in left}
        return sizes.of(fields)

    for module, fields in modules.dense.items():
        layer = of(module)
        layer.dense_bytes += held(layer, fields)
        if module in plan.experts:
            continue  # experts in one tensor, beside EXL3 ones
        for stack in STACKS:
            if stack in fields and module.endswith(".experts"):
                header = fields[stack]
                layer.width = header.shape[0] if header.shape else 0
                layer.experts = Counter({header.dtype: layer.width})
                layer.storage = "one tensor"
    for module, matrix in plan.linears.items():
        layer = of(module)
        layer.exl3_bytes += held(layer, modules.linears[module])
        layer.linears[str(matrix.bits)] += 1
        layer.codebooks.add(matrix.codebook.label)
        layer.add_code(matrix.in_features * matrix.out_features, matrix.words)
    for name, stored in plan.experts.items():
        layer = of(name)
        layer.exl3_bytes += sum(held(layer, at.fields) for at in modules.experts[name])
        _add_experts(layer, stored)
    for name, slices in modules.dense_experts.items():
        layer = of(name)
        layer.dense_bytes += sum(held(layer, at.fields) for at in slices)
        _add_dense_experts(layer, slices)
    for layer in layers.values():
        if layer.width and layer.kind == "dense":
            layer.kind = "MoE"
    last = max((at for at in layers if at is not None), default=0) + 1
    return sorted(
        layers.values(), key=lambda it: last if it.layer is None else it.layer
    )


class _Sizes:
    """Bytes of modules' tensors: a million tensors have few shapes."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}

    def of(self, fields: Mapping[str, TensorHeader]) -> int:
        key = tuple([(header.dtype, header.shape) for header in fields.values()])
        size = self._known.get(key)
        if size is None:
            size = sum(header.num_bytes for header in fields.values())
            self._known[key] = size
        return size


def _add_experts(layer: Layer, stored: ExpertLayer) -> None:
    layer.width = stored.width
    each = stored.hidden * stored.intermediate * stored.ranks
    for codes in stored.encodings:
        bits = [str(code.bits) for code in codes]
        layer.experts[bits[0] if len(set(bits)) == 1 else "/".join(bits)] += 1
        layer.codebooks.update(code.codebook.label for code in codes)
        for code in codes:
            layer.add_code(each, code.words)
            layer.expert_weights += each
            layer.expert_code_bits += each * code.words // 16
    layer.storage = f"{stored.ranks} slices" if stored.sliced else "whole"
    if stored.shared_h:
        layer.storage += ", shared_h"


def _add_dense_experts(layer: Layer, slices: Iterable[Slice]) -> None:
    """Each expert by the type of its weights."""
    dtypes = {
        part.expert: part.fields["weight"].dtype
        for part in slices
        if "weight" in part.fields
    }
    layer.width, layer.storage = len(dtypes), "whole"
    layer.experts = Counter(dtypes.values())
