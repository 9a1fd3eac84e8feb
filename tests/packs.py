# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Tiny EXL3 checkpoints, each with a dense twin that computes the same function.

    pack = write_pack(path, trunk={"attention", "experts"}, ranks=2)

writes an EXL3 checkpoint to `pack.path`, and to `pack.twin` a float32 checkpoint of
plain weights, decoded from the former by `tests.reference_codec`. Both have all
their other tensors in common.

Any words are a valid trellis, so no encoder is needed: words are drawn at random, and
the scales are chosen so that a weight has the spread that `tests.checkpoints` gives
it. A random head has no successor for each token, so the embeddings lean towards the
head instead.
"""

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import reference_codec
from tests.checkpoints import (
    LOGIT_SPREAD,
    SUCCESSOR_LEAN,
    Tensors,
    make_config,
    make_tensors,
    save_checkpoint,
)
from tests.header_files import tail

#: Kinds of linear modules, as `trunk` and `draft` name them. The last three are
#: modules that upstream builds without a quantization config.
KINDS = {
    "attention": r"self_attn\.\w+_proj$|self_attn\.kv_a_proj_with_mqa$",
    "mlp": r"mlp\.\w+_proj$",
    "shared_experts": r"mlp\.shared_experts\.\w+_proj$",
    "experts": r"mlp\.experts\.\d+\.\w+_proj$",
    "head": r"^lm_head$|shared_head\.head$",
    "gate": r"mlp\.gate$",
    "eh_proj": r"eh_proj$",
    "indexer": r"self_attn\.indexer\.(wq_b|wk|weights_proj)$",
}
#: What converters quantize.
LINEARS = frozenset({"attention", "mlp", "shared_experts", "experts"})

#: Where a rank-sliced checkpoint keeps the bits of each expert.
BITMAP_FILE = "tier_bitmap.json"

_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj$")


@dataclass(frozen=True)
class Format:
    """How one module is stored."""

    bits: float = 4
    codebook: str = "mcg"


@dataclass(frozen=True)
class Pack:
    """An EXL3 checkpoint and the dense float32 one that equals it."""

    path: Path
    twin: Path


def write_pack(
    path: str | Path,
    *,
    trunk: Collection[str] = LINEARS,
    draft: Collection[str] | None = None,
    formats: Sequence[Format] = (Format(),),
    ranks: int | None = None,
    shared_h: bool = False,
    legacy_signs: bool = False,
    tensor_storage: bool = True,
    stamp: dict[str, Any] | None = None,
    model_type: str = "deepseek_v3",
    widths: list[int] | None = None,
    layers: int = 3,
    experts: int = 8,
    mtp: int = 1,
    dtype: str = "bfloat16",
    seed: int = 0,
    shards: int = 1,
    **config_fields: Any,
) -> Pack:
    """Writes a random EXL3 checkpoint, and its twin beside it in `<path>-twin`.

    Args:
        path: The folder; made if it isn't there.
        trunk: Kinds of modules (see `KINDS`) that are EXL3 in the decoder layers.
        draft: The same for the MTP layers; None: as in the trunk. The head belongs to
            the trunk, and so does the draft's copy of it.
        formats: Given to the modules one after another, over and over; so three of
            them differ within every expert. Rank-sliced experts take one format an
            expert, as all three projections must have the same there, and only its
            bits, as their codebook is always mcg.
        ranks: Number of ranks that the routed experts are sliced for, with the
            `hybrid_tr3_tail` that says so; None: plain EXL3 experts.
        shared_h: Rank-sliced experts share the vectors of the hidden side.
        legacy_signs: Stores su or sv, packed signs, in place of suh or svh.
        tensor_storage: Writes `quantization_config.json`.
        stamp: `quantization_config` of `config.json`; None: what a converter to EXL3
            writes; empty: there is none.
        model_type: As in `tests.checkpoints.write_checkpoint`, and so is the rest.
        widths: Routed experts of each layer.
        layers: `num_hidden_layers`.
        experts: Routed experts of each layer where `widths` is None.
        mtp: MTP layers.
        dtype: Of the tensors that are not EXL3.
        seed: Of all the randomness.
        shards: Number of safetensors files, of the pack and of the twin.
        **config_fields: Fields of `config.json`.
    """
    path = Path(path)
    config = make_config(
        model_type,
        widths=widths,
        layers=layers,
        experts=experts,
        mtp=mtp,
        dtype=dtype,
        **config_fields,
    )
    stored_widths = widths or [experts] * (layers + mtp)
    dense = make_tensors(config, stored_widths, mtp=mtp, dtype=dtype, seed=seed)
    writer = _Writer(dense, formats, ranks, shared_h, legacy_signs, seed)
    for name in dense:
        key = name.removesuffix(".weight")
        in_trunk = draft is None or _layer(key) < layers or _is_a(key, {"head"})
        if key != name and _is_a(key, trunk if in_trunk else draft):
            writer.replace(key)
    if _is_a("lm_head", trunk):
        writer.lean_towards_head(seed)

    twin_path = path.with_name(f"{path.name}-twin")
    twin_config = {**config, "dtype": "float32"}
    save_checkpoint(twin_path, twin_config, writer.twin, shards=shards)

    config |= _quantization(writer, stamp)
    if writer.expert_bits:
        config["hybrid_tr3_tail"] = _tail(
            writer.expert_bits, stored_widths, ranks, shared_h
        )
    save_checkpoint(path, config, writer.tensors, shards=shards)
    if "bits_per_expert" in config.get("hybrid_tr3_tail", {}):
        (path / BITMAP_FILE).write_text(json.dumps(_bitmap(writer.expert_bits)))
    if tensor_storage:
        block = config.get("quantization_config", {})
        block = {**block, "tensor_storage": _storage(writer)}
        (path / "quantization_config.json").write_text(json.dumps(block))
    return Pack(path, twin_path)


def _layer(key: str) -> int:
    found = _LAYER.search(key)
    return int(found[1]) if found else -1


def _is_a(key: str, kinds: Collection[str]) -> bool:
    return any(re.search(KINDS[kind], key) for kind in kinds)


class _Writer:
    """Replaces dense modules by EXL3 modules, and keeps the tensors of both kinds.

    Attributes:
        tensors: What the pack stores.
        twin: What the twin stores, float32.
        formats: Of each module that is EXL3 and no slice.
        expert_bits: By layer and expert, of the rank-sliced experts.
    """

    def __init__(
        self,
        dense: Tensors,
        formats: Sequence[Format],
        ranks: int | None,
        shared_h: bool,
        legacy_signs: bool,
        seed: int,
    ):
        self.tensors = dict(dense)
        self.twin = {
            name: tensor.to(torch.float32, copy=True) for name, tensor in dense.items()
        }
        self.formats: dict[str, Format] = {}
        self.expert_bits: dict[int, dict[int, float]] = {}
        self._formats = formats
        self._ranks = ranks
        self._shared_h = shared_h
        self._legacy_signs = legacy_signs
        self._draw = np.random.default_rng(seed)

    def replace(self, key: str) -> None:
        """Draws an EXL3 module in place of a dense one of the same spread."""
        weight = self.tensors.pop(f"{key}.weight")
        n, k = weight.shape
        spread = weight.float().square().mean().sqrt().item()
        if _EXPERT.search(key) and self._ranks is not None:
            drawn = self._sliced(key, n, k, spread)
        elif key.endswith("shared_head.head"):
            drawn = self._copy("lm_head", key)
        else:
            if key == "lm_head":
                spread = LOGIT_SPREAD / math.sqrt(k)
            self.formats[key] = self._formats[len(self.formats) % len(self._formats)]
            drawn = self._draw_module(key, n, k, spread, self.formats[key])
        self.twin[f"{key}.weight"] = drawn
        bias = self.tensors.get(f"{key}.bias")
        if bias is not None:
            padded = torch.nn.functional.pad(bias, (0, -len(bias) % 128)).half()
            self.tensors[f"{key}.bias"] = padded
            self.twin[f"{key}.bias"] = padded[:n].float()

    def lean_towards_head(self, seed: int) -> None:
        """Gives every token a successor, as `tests.checkpoints` does by its head."""
        head = self.twin["lm_head.weight"]
        generator = torch.Generator().manual_seed(seed)
        towards = head[torch.randperm(len(head), generator=generator)]
        lean = SUCCESSOR_LEAN * towards / towards.norm(dim=1, keepdim=True)
        for name, embed in self.tensors.items():
            if name.endswith("embed_tokens.weight"):
                leaning = (embed.float() + lean).to(embed.dtype)
                self.tensors[name], self.twin[name] = leaning, leaning.float()

    def _copy(self, key: str, to: str) -> torch.Tensor:
        """Stores a module once more under another name; returns its weight."""
        self.formats[to] = self.formats[key]
        for name in [name for name in self.tensors if name.startswith(f"{key}.")]:
            self.tensors[to + name.removeprefix(key)] = self.tensors[name].clone()
        return self.twin[f"{key}.weight"].clone()

    def _sliced(self, key: str, n: int, k: int, spread: float) -> torch.Tensor:
        """Draws one projection of a rank-sliced expert, every slice by itself."""
        layer, expert, projection = _EXPERT.search(key).groups()
        position = (int(layer) + int(expert)) % len(self._formats)
        bits = self._formats[position].bits
        self.expert_bits.setdefault(int(layer), {})[int(expert)] = bits
        # The axis of the intermediate features, and the other side's vector.
        axis, field = (1, "svh") if projection == "down" else (0, "suh")
        n, k = (n, k // self._ranks) if axis else (n // self._ranks, k)
        slices = []
        for rank in range(self._ranks):
            shared = None
            if self._shared_h:
                module = key.replace(f"experts.{expert}.", "experts.shared_h.")
                shared = f"{module}.rank{rank}.{field}"
            module = f"{key}.rank{rank}"
            drawn = self._draw_module(module, n, k, spread, Format(bits), shared)
            slices.append(drawn)
        return torch.cat(slices, axis)

    def _draw_module(
        self,
        key: str,
        n: int,
        k: int,
        spread: float,
        format: Format,
        shared: str | None = None,
    ) -> torch.Tensor:
        """Draws the tensors of an EXL3 module.

        Args:
            key: Its name.
            n: Out-features. What is stored is padded to 128, and so is k.
            k: In-features.
            spread: Root mean square of the weights.
            format: Bits and codebook.
            shared: Name of a suh or svh that takes the place of the module's own.

        Returns:
            The weight that was drawn, float32 [n, k].
        """
        stored_k, stored_n = k + -k % 128, n + -n % 128
        shape = (stored_k // 16, stored_n // 16, int(16 * format.bits))
        trellis = self._draw.integers(0, 65536, shape, np.uint16).view(np.int16)
        vectors = {"suh": self._signs(stored_k), "svh": self._signs(stored_n)}
        signs = None  # the vector that is stored as packed signs
        if self._legacy_signs:
            signs = ("suh", "svh")[len(self.formats) % 2]
        scaled = "svh" if signs == "suh" else "suh"
        # Scales vary, as real ones do. Padding has scales too: writers once left
        # them there, and what it decodes to must never count.
        scale = spread / reference_codec.SIGMA[format.codebook]
        scales = scale * self._draw.uniform(0.9, 1.1, vectors[scaled].shape)
        vectors[scaled] = (vectors[scaled] * scales).astype(np.float16)
        for field, vector in vectors.items():
            if shared and shared.endswith(field):
                one = self.tensors.setdefault(shared, torch.from_numpy(vector))
                vectors[field] = one.numpy()
            elif field == signs:
                packed = np.packbits(vector < 0, bitorder="little").view(np.int16)
                self.tensors[f"{key}.{field[:2]}"] = torch.from_numpy(packed)
            else:
                self.tensors[f"{key}.{field}"] = torch.from_numpy(vector)
        self.tensors[f"{key}.trellis"] = torch.from_numpy(trellis)
        marker = reference_codec.MARKERS.get(format.codebook)
        if marker is not None:
            signed = np.uint32(marker).view(np.int32)
            self.tensors[f"{key}.{format.codebook}"] = torch.tensor(signed)
        weight = reference_codec.dense_weight(
            trellis, **vectors, codebook=format.codebook
        )
        return torch.from_numpy(weight[:k, :n].T.astype(np.float32)).contiguous()

    def _signs(self, size: int) -> np.ndarray:
        return (1.0 - 2.0 * self._draw.integers(0, 2, size)).astype(np.float16)


def _quantization(writer: _Writer, stamp: dict[str, Any] | None) -> dict[str, Any]:
    if stamp is not None:
        return {"quantization_config": stamp} if stamp else {}
    formats = list(writer.formats.values()) or [Format()]
    head = writer.formats.get("lm_head")
    return {
        "quantization_config": {
            "quant_method": "exl3",
            "version": "1.4.1",
            "bits": sum(format.bits for format in formats) / len(formats),
            "head_bits": head.bits if head else 16,
            "calibration": {"rows": 250, "cols": 2048},
            "out_scales": "always",
            "codebook": formats[0].codebook,
        }
    }


def _tail(
    expert_bits: dict[int, dict[int, float]],
    widths: list[int],
    ranks: int,
    shared_h: bool,
) -> dict[str, Any]:
    values = sorted({bits for of in expert_bits.values() for bits in of.values()})
    stored = {widths[layer] for layer in expert_bits}
    fields: dict[str, Any] = {
        "bits": values[0],
        "mcg_multiplier": reference_codec.MARKERS["mcg"],
    }
    if len(values) > 1:
        fields |= {
            "bits": "mixed",
            "k_values": values,
            "bits_per_expert": f"{BITMAP_FILE}:k",
        }
    if shared_h:
        fields |= {
            "rotation_layout": "shared_h_v1",
            "shared_h_tensor_schema": "model.layers.{L}.mlp.experts.shared_h.{proj}."
            "rank{r}.{suh|svh}",
        }
    width = stored.pop() if len(stored) == 1 else widths
    return tail(ranks, (min(expert_bits), max(expert_bits)), width, **fields)


def _bitmap(expert_bits: dict[int, dict[int, float]]) -> dict[str, Any]:
    """The bits of each expert, which the tail of a mixed checkpoint points to."""
    return {str(layer): {"k": list(of.values())} for layer, of in expert_bits.items()}


def _storage(writer: _Writer) -> dict[str, Any]:
    """The hint that converters write beside a plain EXL3 checkpoint."""
    storage = {}
    for key, format in writer.formats.items():
        tensors = {
            name: {
                "shape": list(tensor.shape),
                "n_bytes": tensor.nbytes,
                "dtype": str(tensor.dtype),
            }
            for suffix in ("trellis", "suh", "su", "svh", "sv", "mcg", "mul1", "bias")
            if (tensor := writer.tensors.get(name := f"{key}.{suffix}")) is not None
        }
        entry = {
            "stored_tensors": tensors,
            "quant_format": "exl3",
            "bits_per_weight": format.bits,
        }
        if format.codebook in reference_codec.MARKERS:
            marker = reference_codec.MARKERS[format.codebook]
            entry[f"{format.codebook}_multiplier"] = marker
        storage[key] = entry
    return storage
