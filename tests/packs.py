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
            The head belongs to the trunk.
        draft: The same for the MTP layers; None: as in the trunk.
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
    twin = {name: tensor.to(torch.float32, copy=True) for name, tensor in dense.items()}
    writer = _Writer(seed, legacy_signs)
    is_sliced = set()
    position = 0
    for name, weight in dense.items():
        key = name.removesuffix(".weight")
        kinds = trunk if draft is None or _layer(key) < layers else draft
        if key == name or not _is_a(key, kinds):
            continue
        expert = _EXPERT.search(key)
        if expert and ranks is not None:
            layer, index = int(expert[1]), int(expert[2])
            bits = formats[(layer + index) % len(formats)].bits
            shared = key.replace(f"experts.{index}.", "experts.shared_h.")
            twin[name] = writer.sliced(
                key, weight, bits, ranks, shared if shared_h else None
            )
            is_sliced.add(layer)
        elif key.endswith("shared_head.head"):
            writer.copy("lm_head", key)
            twin[name] = twin["lm_head.weight"].clone()
        else:
            if key == "lm_head":
                weight = torch.full_like(
                    weight, LOGIT_SPREAD / math.sqrt(weight.shape[1])
                )
            bias = dense.get(f"{key}.bias")
            if bias is not None:
                twin[f"{key}.bias"] = bias.half().float()
            twin[name] = writer.linear(
                key, weight, formats[position % len(formats)], bias
            )
            position += 1

    stored = {name: t for name, t in dense.items() if not writer.replaces(name)}
    if _is_a("lm_head", trunk):
        _lean_towards_head(stored, twin, seed)
    config |= _quantization(formats, stamp)
    if is_sliced:
        config["hybrid_tr3_tail"] = tail = _tail(
            writer.expert_bits, stored_widths, is_sliced, ranks, shared_h
        )
        if tail["bits"] == "mixed":
            path.mkdir(parents=True, exist_ok=True)
            bitmap = {
                str(layer): {"k": [bits[e] for e in sorted(bits)]}
                for layer, bits in writer.expert_bits.items()
            }
            (path / "tier_bitmap.json").write_text(json.dumps(bitmap))
    save_checkpoint(path, config, stored | writer.tensors, shards=shards)
    if tensor_storage:
        storage = {
            **config.get("quantization_config", {}),
            "tensor_storage": _storage(writer),
        }
        (path / "quantization_config.json").write_text(json.dumps(storage))
    twin_config = {
        field: value
        for field, value in config.items()
        if field not in ("quantization_config", "hybrid_tr3_tail")
    }
    twin_path = path.with_name(f"{path.name}-twin")
    save_checkpoint(twin_path, twin_config | {"dtype": "float32"}, twin, shards=shards)
    return Pack(path, twin_path)


def _layer(key: str) -> int:
    found = _LAYER.search(key)
    return int(found[1]) if found else -1


def _is_a(key: str, kinds: Collection[str]) -> bool:
    return any(re.search(KINDS[kind], key) for kind in kinds)


class _Writer:
    """Draws EXL3 modules, and keeps their tensors."""

    def __init__(self, seed: int, legacy_signs: bool):
        self.tensors: Tensors = {}
        self.formats: dict[str, Format] = {}
        self.expert_bits: dict[int, dict[int, float]] = {}
        self._draw = np.random.default_rng(seed)
        self._legacy_signs = legacy_signs
        self._replaced: set[str] = set()

    def replaces(self, name: str) -> bool:
        """Whether a dense tensor gave way to an EXL3 module."""
        return name in self._replaced

    def linear(
        self, key: str, weight: torch.Tensor, format: Format, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Draws an EXL3 module in place of a dense one of the same spread.

        Args:
            key: Name of the module.
            weight: [n, k], in whose place the module stands.
            format: Its bits and codebook.
            bias: [n] or None.

        Returns:
            The weight that was drawn, float32 [n, k].
        """
        self._replaced.add(f"{key}.weight")
        if bias is not None:
            self._replaced.add(f"{key}.bias")
            padding = -len(bias) % 128
            self.tensors[f"{key}.bias"] = torch.nn.functional.pad(
                bias, (0, padding)
            ).half()
        self.formats[key] = format
        return self._module(key, *weight.shape, _spread(weight), format)

    def copy(self, key: str, to: str) -> None:
        """Stores a module once more under another name."""
        self._replaced.add(f"{to}.weight")
        self.formats[to] = self.formats[key]
        for name in [name for name in self.tensors if name.startswith(f"{key}.")]:
            self.tensors[to + name.removeprefix(key)] = self.tensors[name].clone()

    def sliced(
        self,
        key: str,
        weight: torch.Tensor,
        bits: float,
        ranks: int,
        shared: str | None,
    ) -> torch.Tensor:
        """Draws one projection of a rank-sliced expert, every slice by itself.

        Args:
            key: Name of the projection.
            weight: [n, k], in whose place it stands.
            bits: Of all its slices.
            ranks: Number of slices.
            shared: Name under which the layer keeps the hidden side's vector; None
                where every expert has its own.

        Returns:
            The weight that was drawn, float32 [n, k].
        """
        self._replaced.add(f"{key}.weight")
        layer, expert, projection = _EXPERT.search(key).groups()
        self.expert_bits.setdefault(int(layer), {})[int(expert)] = bits
        axis = 1 if projection == "down" else 0  # of the intermediate features
        field = "svh" if projection == "down" else "suh"
        slices = []
        for rank, part in enumerate(weight.chunk(ranks, axis)):
            vector = f"{shared}.rank{rank}.{field}" if shared else None
            slices.append(
                self._module(
                    f"{key}.rank{rank}",
                    *part.shape,
                    _spread(weight),
                    Format(bits),
                    hidden_side=(field, vector) if vector else None,
                )
            )
        return torch.cat(slices, axis)

    def _module(
        self,
        key: str,
        n: int,
        k: int,
        spread: float,
        format: Format,
        hidden_side: tuple[str, str] | None = None,
    ) -> torch.Tensor:
        """Draws a module's tensors; returns its weight, float32 [n, k].

        `hidden_side` is the field, suh or svh, that the module shares with others,
        and the tensor's name.
        """
        stored_k, stored_n = k + -k % 128, n + -n % 128
        shape = (stored_k // 16, stored_n // 16, int(16 * format.bits))
        trellis = self._draw.integers(0, 65536, shape, np.uint16).view(np.int16)
        scale = spread / reference_codec.SIGMA[format.codebook]
        vectors = {"suh": self._signs(stored_k), "svh": self._signs(stored_n)}
        signs = None  # the field that is stored as packed signs
        if self._legacy_signs:
            signs = ("suh", "svh")[len(self.tensors) % 2]
        scaled = "svh" if signs == "suh" else "suh"
        # Scales vary, as real ones do. Padding has scales too: writers once left
        # them there, and what it decodes to must never count.
        varied = scale * self._draw.uniform(0.9, 1.1, vectors[scaled].shape)
        vectors[scaled] = (vectors[scaled] * varied).astype(np.float16)
        for field, vector in vectors.items():
            if hidden_side and field == hidden_side[0]:
                name = hidden_side[1]
                shared = self.tensors.setdefault(name, torch.from_numpy(vector))
                vectors[field] = shared.numpy()
            elif field == signs:
                packed = np.packbits(vector < 0, bitorder="little").view(np.int16)
                self.tensors[f"{key}.{field[:2]}"] = torch.from_numpy(packed)
            else:
                self.tensors[f"{key}.{field}"] = torch.from_numpy(vector)
        self.tensors[f"{key}.trellis"] = torch.from_numpy(trellis)
        if format.codebook in reference_codec.MARKERS:
            marker = np.uint32(reference_codec.MARKERS[format.codebook])
            self.tensors[f"{key}.{format.codebook}"] = torch.tensor(
                int(marker.view(np.int32)), dtype=torch.int32
            )
        weight = reference_codec.dense_weight(
            trellis, **vectors, codebook=format.codebook
        )
        return torch.from_numpy(weight[:k, :n].T.astype(np.float32)).contiguous()

    def _signs(self, size: int) -> np.ndarray:
        return (1.0 - 2.0 * self._draw.integers(0, 2, size)).astype(np.float16)


def _spread(weight: torch.Tensor) -> float:
    return weight.float().square().mean().sqrt().item()


def _lean_towards_head(stored: Tensors, twin: Tensors, seed: int) -> None:
    """Gives every token a successor, as `tests.checkpoints` does by its head."""
    head = twin["lm_head.weight"]
    generator = torch.Generator().manual_seed(seed)
    towards = head[torch.randperm(len(head), generator=generator)]
    lean = SUCCESSOR_LEAN * towards / towards.norm(dim=1, keepdim=True)
    for name in stored:
        if name.endswith("embed_tokens.weight"):
            leaning = (stored[name].float() + lean).to(stored[name].dtype)
            stored[name], twin[name] = leaning, leaning.float()


def _quantization(
    formats: Sequence[Format], stamp: dict[str, Any] | None
) -> dict[str, Any]:
    if stamp is not None:
        return {"quantization_config": stamp} if stamp else {}
    return {
        "quantization_config": {
            "quant_method": "exl3",
            "version": "1.4.1",
            "bits": sum(format.bits for format in formats) / len(formats),
            "head_bits": formats[0].bits,
            "calibration": {"rows": 250, "cols": 2048},
            "out_scales": "always",
            "codebook": formats[0].codebook,
        }
    }


def _tail(
    expert_bits: dict[int, dict[int, float]],
    widths: list[int],
    layers: Collection[int],
    ranks: int,
    shared_h: bool,
) -> dict[str, Any]:
    values = sorted({bits for of in expert_bits.values() for bits in of.values()})
    stored = [widths[layer] for layer in sorted(layers)]
    tail: dict[str, Any] = {
        "format": "exl3-trellis",
        "codebook": "mcg",
        "tp": ranks,
        "moe_layers": [min(layers), max(layers)],
        "experts_per_layer": stored[0] if len(set(stored)) == 1 else widths,
        "tensor_schema": "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}."
        "{trellis|suh|svh|mcg}",
        "bits": values[0],
        "mcg_multiplier": reference_codec.MARKERS["mcg"],
    }
    if len(values) > 1:
        tail |= {
            "bits": "mixed",
            "k_values": values,
            "bits_per_expert": "tier_bitmap.json:k",
        }
    if shared_h:
        tail |= {
            "rotation_layout": "shared_h_v1",
            "shared_h_tensor_schema": "model.layers.{L}.mlp.experts.shared_h.{proj}."
            "rank{r}.{suh|svh}",
        }
    return tail


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
