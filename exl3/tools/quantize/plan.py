# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What becomes of every tensor of a checkpoint, told from its headers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.modules import FUSED, Fields
from exl3.format.constants import HADAMARD, padded
from exl3.format.errors import TensorError, UnsupportedFormatError
from exl3.format.metadata import UNQUANTIZED_BITS
from exl3.format.names import (
    PROJECTION_OF,
    PROJECTIONS,
    SHARED_H,
    STACKS,
    layer_of,
    parse_name,
)
from exl3.tools.quantize.recipe import Bits, Recipe
from exl3.tools.shared.errors import ToolError

#: Linear layers that converters encode, by the last part of their names.
_LINEARS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
        *("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"),
    }
)
#: Parts of names of modules that are small, or that errors would cost much.
_KEPT_PARTS = frozenset({"indexer", "visual", "vision_tower", "vision_model", "audio"})
_HEAD = "lm_head"
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Linear:
    """A linear layer to encode.

    Attributes:
        module: Its name.
        weight: The tensor to encode `[n, k]`: the embeddings', for a head tied to them.
        bias: The tensor of its bias, if it has one.
        bits: Bits per weight.
    """

    module: str
    weight: TensorHeader
    bias: TensorHeader | None
    bits: Bits

    @property
    def num_weights(self) -> int:
        """Weights as stored, filled up to whole blocks."""
        return _stored(self.weight)


@dataclass
class Experts:
    """The routed experts of a layer, to encode.

    Attributes:
        name: Their module, `model.layers.3.mlp.experts`.
        weights: The tensors of each expert by "gate", "up" and "down".
    """

    name: str
    weights: list[dict[str, TensorHeader]]

    @property
    def width(self) -> int:
        """Routed experts."""
        return len(self.weights)

    @property
    def num_weights(self) -> int:
        """Weights as stored, filled up to whole blocks."""
        return sum(_stored(at) for expert in self.weights for at in expert.values())


@dataclass
class Part:
    """A layer, or what belongs to none: it is written at once.

    Attributes:
        name: `layer-3`, or `rest`.
        layer: Global index of the layer; None for the rest.
        kept: Tensors that are copied.
        linears: Linear layers to encode.
        experts: Routed experts to encode.
    """

    name: str
    layer: int | None
    kept: list[TensorHeader] = field(default_factory=list)
    linears: list[Linear] = field(default_factory=list)
    experts: Experts | None = None

    @property
    def num_weights(self) -> int:
        """Weights to encode, as stored."""
        experts = self.experts.num_weights if self.experts else 0
        return experts + sum(linear.num_weights for linear in self.linears)

    @property
    def num_bytes(self) -> int:
        """Bytes of the source's tensors."""
        experts = self.experts.weights if self.experts else []
        headers = [*self.kept, *(at for expert in experts for at in expert.values())]
        headers += [linear.weight for linear in self.linears]
        return sum(header.num_bytes for header in headers)


def _stored(weight: TensorHeader) -> int:
    n, k = weight.shape
    return padded(n) * padded(k)


def plan_parts(
    modules: Mapping[str, Fields], num_layers: int, recipe: Recipe, *, tied: bool
) -> list[Part]:
    """Sorts the tensors of a dense checkpoint.

    Args:
        modules: Every tensor, by its module.
        num_layers: Decoder layers; draft layers come after them.
        recipe: What is asked for.
        tied: Whether the head is the embeddings, where none is stored.

    Returns:
        The layers by their index, and the rest at the end.

    Raises:
        CheckpointError: A tensor is not what its name says.
        ToolError: The recipe does not fit the checkpoint.
    """
    planner = _Planner(num_layers, recipe)
    for module, fields in modules.items():
        planner.add(module, fields)
    parts = planner.finish()
    if tied and _HEAD not in modules and recipe.head_bits != UNQUANTIZED_BITS:
        module, _, name = _EMBEDDING.rpartition(".")
        weight = modules.get(module, {}).get(name)
        if weight is None:
            raise TensorError(
                f"{_EMBEDDING}: is not stored, and by tie_word_embeddings it is the "
                "head; fetch the missing file, or give --head-bits 16"
            )
        if not planner.is_dense(_HEAD):
            parts[-1].linears.append(Linear(_HEAD, weight, None, recipe.head_bits))
    planner.check_patterns()
    _check_fused(parts)
    if recipe.ranks is not None:
        _check_sliced(parts, num_layers, recipe.ranks)
    if not any(part.num_weights for part in parts):
        raise ToolError(
            "nothing is left to encode: no linear layer of the checkpoint has a name "
            "that is known, or --dense and 16 bits leave all of them as they are"
        )
    return parts


class _Planner:
    """Collects the parts of a checkpoint."""

    def __init__(self, num_layers: int, recipe: Recipe):
        self.num_layers = num_layers
        self.recipe = recipe
        self.layers: dict[int, Part] = {}
        self.rest = Part("rest", None)
        self.experts: dict[str, dict[int, dict[str, TensorHeader]]] = {}
        self.dense_experts: dict[str, str] = {}  # the pattern, by the experts' name
        self.unmatched = set(recipe.dense)

    def add(self, module: str, fields: Fields) -> None:
        layer = layer_of(module, self.num_layers)
        part = self.rest
        if layer is not None:
            part = self.layers.setdefault(layer, Part(f"layer-{layer}", layer))
        match = parse_name(f"{module}.weight")
        stacked = [fields[name] for name in STACKS if name in fields]
        if module.endswith(".experts") and stacked:
            raise UnsupportedFormatError(
                f"{stacked[0].file}: {stacked[0].name} holds all experts of a layer; "
                "store them one by one, as experts.0.gate_proj.weight"
            )
        if match and match["experts"] and match["expert"] != SHARED_H:
            self._add_expert(part, match, module, fields)
            return
        bits = self._bits(module, layer, fields)
        if bits == UNQUANTIZED_BITS:
            part.kept += fields.values()
            return
        weight = self._matrix(fields["weight"])
        part.linears.append(Linear(module, weight, fields.get("bias"), bits))
        known = ("weight", "bias")
        part.kept += [at for name, at in fields.items() if name not in known]

    def _bits(self, module: str, layer: int | None, fields: Fields) -> Bits:
        """Bits of a module that is no routed expert."""
        parts = module.split(".")
        weight = fields.get("weight")
        if weight is None or self.is_dense(module):
            return UNQUANTIZED_BITS
        if module == _HEAD:
            return self.recipe.head_bits
        is_linear = parts[-1] in _LINEARS and _KEPT_PARTS.isdisjoint(parts)
        if layer is None or not is_linear or self._is_kept_draft(layer):
            return UNQUANTIZED_BITS
        return self.recipe.attn_bits

    def _add_expert(
        self, part: Part, match: re.Match[str], module: str, fields: Fields
    ) -> None:
        name, expert = match["experts"], int(match["expert"])
        pattern = self.is_dense(module)
        known = self.dense_experts.setdefault(name, pattern)
        if bool(known) != bool(pattern):
            raise ToolError(
                f"--dense {known or pattern}: matches some experts of {name} and not "
                "others; the experts of a layer are stored in one way"
            )
        if pattern or part.layer is None or self._is_kept_draft(part.layer):
            part.kept += fields.values()
            return
        if fields.keys() != {"weight"}:
            other = next(at for field, at in fields.items() if field != "weight")
            raise UnsupportedFormatError(
                f"{other.file}: {other.name}: an expert's projection has a weight and "
                "nothing else; store the checkpoint in BF16"
            )
        projections = self.experts.setdefault(name, {}).setdefault(expert, {})
        projections[PROJECTION_OF[match["projection"]]] = self._matrix(fields["weight"])

    def _is_kept_draft(self, layer: int) -> bool:
        return layer >= self.num_layers and self.recipe.mtp_bits == UNQUANTIZED_BITS

    def is_dense(self, module: str) -> str:
        """The pattern that leaves a module as it is, or an empty string."""
        for pattern in self.recipe.dense:
            if fnmatchcase(module, pattern):
                self.unmatched.discard(pattern)
                return pattern
        return ""

    def _matrix(self, weight: TensorHeader) -> TensorHeader:
        if len(weight.shape) != 2 or 0 in weight.shape:
            raise TensorError(
                f"{weight.file}: {weight.name} has shape {list(weight.shape)}; "
                "expected a matrix: leave it as it is with --dense, or fetch the file "
                "again"
            )
        return weight

    def finish(self) -> list[Part]:
        for name, found in self.experts.items():
            weights = [found.get(expert, {}) for expert in range(max(found) + 1)]
            for expert, of in enumerate(weights):
                missing = [at for at in PROJECTIONS if at not in of]
                if missing:
                    raise TensorError(
                        f"{name}.{expert}: the {missing[0]} projection is not stored; "
                        "fetch the missing file"
                    )
            layer = layer_of(name, self.num_layers)
            assert layer is not None
            self.layers[layer].experts = Experts(name, weights)
        return [*(part for _, part in sorted(self.layers.items())), self.rest]

    def check_patterns(self) -> None:
        if self.unmatched:
            pattern = sorted(self.unmatched)[0]
            raise ToolError(
                f"--dense {pattern}: matches no module; name one such as "
                "'model.layers.0.*'"
            )


def _check_fused(parts: list[Part]) -> None:
    """Refuses to encode a part of what is computed as one."""
    for part in parts:
        encoded = {linear.module for linear in part.linears}
        for header in part.kept:
            parent, _, name = header.name.removesuffix(".weight").rpartition(".")
            for group in FUSED:
                others = [f"{parent}.{each}" for each in group]
                other = next((each for each in others if each in encoded), None)
                if name in group and other is not None:
                    raise ToolError(
                        f"--dense: leaves {parent}.{name} as it is, and {other} is "
                        f"encoded; {', '.join(group)} are computed as one, so name all "
                        "of them"
                    )


def _check_sliced(parts: list[Part], num_layers: int, ranks: int) -> None:
    """Refuses a checkpoint that has no rank-sliced form."""
    layers = [part.layer for part in parts if part.experts and part.layer is not None]
    if not layers:
        raise ToolError(
            "--rank-sliced: slices routed experts, and none are to be encoded; make a "
            "plain pack"
        )
    if layers != list(range(layers[0], layers[-1] + 1)):
        raise ToolError(
            f"--rank-sliced: takes layers in a row, and routed experts are to be "
            f"encoded in {layers}; make a plain pack"
        )
    for part in parts:
        for at in _first_expert(part):
            n, k = at.shape
            features = k if at.name.endswith(("down_proj.weight", "w2.weight")) else n
            hidden = n + k - features
            if features % (ranks * HADAMARD) or hidden % HADAMARD:
                raise ToolError(
                    f"--rank-sliced --tp {ranks}: {at.name} has {features} "
                    f"intermediate and {hidden} hidden features; slices are whole "
                    f"blocks of {HADAMARD} of both: choose another --tp, or make a "
                    "plain pack"
                )


def _first_expert(part: Part) -> Iterator[TensorHeader]:
    for expert in part.experts.weights if part.experts else []:
        yield from expert.values()
