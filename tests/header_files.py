# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Checkpoints that have headers and no weights, of any size.

    tensors = linear("lm_head", 256, 512, bits=6) | experts("model.layers.1", 4)
    write_folder(path, tensors, config={...}, shards=2)

The files are sparse: they have the right length and take no room.
"""

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: A tensor's safetensors dtype and shape.
Tensor = tuple[str, tuple[int, ...]]
Tensors = dict[str, Tensor]

BYTES = {"BF16": 2, "F16": 2, "I16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1, "U8": 1}
INDEX_FILE = "model.safetensors.index.json"
TENSOR_SCHEMA = "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}"
SHARED_H_SCHEMA = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"


def linear(
    module: str, k: int, n: int, bits: float = 4, codebook: str = "mcg"
) -> Tensors:
    """The tensors of one EXL3 matrix."""
    tensors: Tensors = {
        f"{module}.trellis": ("I16", (k // 16, n // 16, int(16 * bits))),
        f"{module}.suh": ("F16", (k,)),
        f"{module}.svh": ("F16", (n,)),
    }
    if codebook != "3inst":
        tensors[f"{module}.{codebook}"] = ("I32", ())
    return tensors


def dense(module: str, k: int, n: int, dtype: str = "BF16") -> Tensors:
    return {f"{module}.weight": (dtype, (n, k))}


def experts(
    layer: str,
    width: int,
    *,
    hidden: int = 256,
    intermediate: int = 256,
    ranks: int | None = None,
    bits: Any = 4,
    codebook: str = "mcg",
    spelling: Iterable[str] = ("gate_proj", "up_proj", "down_proj"),
) -> Tensors:
    """Routed experts, and their router.

    `bits` is a number or a function of expert and projection. `intermediate` is that
    of all `ranks` slices together; without ranks the experts are whole.
    """
    tensors: Tensors = {f"{layer}.mlp.gate.weight": ("BF16", (width, hidden))}
    size = intermediate // (ranks or 1)
    for expert in range(width):
        for at, projection in enumerate(spelling):
            k, n = (size, hidden) if at == 2 else (hidden, size)
            rate = bits(expert, at) if callable(bits) else bits
            for rank in range(ranks or 1):
                module = f"{layer}.mlp.experts.{expert}.{projection}"
                module += "" if ranks is None else f".rank{rank}"
                tensors |= linear(module, k, n, rate, codebook)
    return tensors


def tail(ranks: int, layers: tuple[int, int], width: Any, **fields: Any) -> dict:
    """The metadata of a rank-sliced checkpoint; a field of None is left out."""
    whole = {
        "format": "exl3-trellis",
        "codebook": "mcg",
        "tp": ranks,
        "moe_layers": list(layers),
        "experts_per_layer": width,
        "tensor_schema": TENSOR_SCHEMA,
        "bits": 4,
        **fields,
    }
    return {name: value for name, value in whole.items() if value is not None}


def write_file(
    path: Path, header: object, body: bytes | int = b"", length: int | None = None
) -> Path:
    """Writes a safetensors file: any header, and a body or the size of one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", size) + text)
        if isinstance(body, bytes):
            stream.write(body)
        else:
            stream.truncate(stream.tell() + body)
    return path


def header_of(tensors: Tensors) -> tuple[dict[str, Any], int]:
    """A file's header, and the size of its body."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    return header, at


def write_folder(
    folder: Path,
    tensors: Tensors,
    config: dict[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Writes a checkpoint of these tensors, with an index if it has shards."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    index = {}
    for shard in range(shards):
        of = f"model-{shard + 1:05}-of-{shards:05}"
        file = "model.safetensors" if shards == 1 else f"{of}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        write_file(folder / file, *header_of(part))
        index |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def write_glm52(folder: Path) -> int:
    """Writes the headers of GLM-5.2 with its experts in four slices.

    The index has 922,068 tensors in 78 files, and the experts have 3 and 4 bits.

    Returns:
        The number of tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for layer in range(78):
        name, tensors = f"model.layers.{layer}", {}
        for part in (
            "q_a_proj",
            "q_b_proj",
            "kv_a_proj_with_mqa",
            "kv_b_proj",
            "o_proj",
        ):
            tensors |= dense(f"{name}.self_attn.{part}", 6144, 1024)
        if layer < 3:
            tensors |= dense(f"{name}.mlp.down_proj", 12288, 6144)
        else:
            tensors |= experts(
                name,
                256,
                hidden=6144,
                intermediate=2048,
                ranks=4,
                bits=lambda expert, _: 3 + expert % 2,
            )
        file = f"model-{layer + 1:05}-of-00078.safetensors"
        write_file(folder / file, *header_of(tensors))
        index |= dict.fromkeys(tensors, file)
    bits = [3 + expert % 2 for expert in range(256)]
    config = {
        "num_hidden_layers": 78,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "num_attention_heads": 64,
        "hidden_size": 6144,
        "moe_intermediate_size": 2048,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "hybrid_tr3_tail": tail(
            4,
            (3, 77),
            256,
            bits="mixed",
            k_values=[3, 4],
            bits_per_expert="bits.json:k",
        ),
    }
    files = {
        INDEX_FILE: {"weight_map": index},
        "config.json": config,
        "bits.json": {str(layer): {"k": bits} for layer in range(3, 78)},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return len(index)
