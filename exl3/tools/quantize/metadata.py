# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The metadata that a written EXL3 checkpoint carries."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from exl3.checkpoint.file_header import TensorHeader
from exl3.format.constants import MULTIPLIERS, Codebook, bits_of
from exl3.format.metadata import QUANT_METHOD
from exl3.format.names import parse_name
from exl3.format.tail import PER_EXPERT_LAYOUT, TAIL_FORMAT, TENSOR_SCHEMA

#: The exllamav3 release whose format is written: readers look for a version.
FORMAT_VERSION = "0.0.43"
PRODUCER = "vllm-hetero"
BITS_MAP_FILE = "bits_map.json"
BITS_MAP_FIELD = "k"
#: How `tensor_storage` spells types: as torch does.
_DTYPES = {
    "BF16": "torch.bfloat16",
    "F16": "torch.float16",
    "F32": "torch.float32",
    "F64": "torch.float64",
    "I16": "torch.int16",
    "I32": "torch.int32",
    "I64": "torch.int64",
    "U8": "torch.uint8",
    "BOOL": "torch.bool",
}


def quantization_config(
    bits: int | float | str,
    head_bits: int | float,
    codebook: Codebook,
    **more: Any,
) -> dict[str, Any]:
    """The `quantization_config` of `config.json`.

    Args:
        bits: What the body's weights have, or "mixed".
        head_bits: What `lm_head` has.
        codebook: What new tensors have; each tensor's marker decides.
        **more: Other fields.
    """
    return {
        "quant_method": QUANT_METHOD,
        "version": FORMAT_VERSION,
        "bits": bits,
        "head_bits": head_bits,
        "codebook": codebook.label,
        "producer": PRODUCER,
        **more,
    }


def tensor_storage(tensors: Iterable[TensorHeader]) -> dict[str, Any]:
    """The `tensor_storage` of `quantization_config.json`: each module's tensors.

    Args:
        tensors: Every tensor of the checkpoint. Slices of ranks belong to
            `hybrid_tr3_tail` and are left out.
    """
    modules: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        parts = parse_name(tensor.name)
        if parts is None or parts["rank"] is not None:
            continue
        entry = modules.setdefault(parts["module"], {"stored_tensors": {}})
        entry["stored_tensors"][tensor.name] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.num_bytes,
            "dtype": _DTYPES.get(tensor.dtype, tensor.dtype),
        }
        if parts["field"] == "trellis":
            entry["quant_format"] = QUANT_METHOD
            entry["bits_per_weight"] = bits_of(tensor.shape[-1])
        for codebook, multiplier in MULTIPLIERS.items():
            if parts["field"] == codebook.label:
                entry[f"{codebook.label}_multiplier"] = multiplier
    return modules


def rank_sliced_tail(
    bits: Mapping[int, Sequence[int | float]], ranks: int
) -> dict[str, Any]:
    """The `hybrid_tr3_tail` of `config.json`.

    Args:
        bits: Bits of every routed expert by global layer index; the layers are in a
            row.
        ranks: Slices of each expert.
    """
    layers = sorted(bits)
    values = sorted({k for row in bits.values() for k in row})
    return {
        "format": TAIL_FORMAT,
        "codebook": Codebook.MCG.label,
        "mcg_multiplier": MULTIPLIERS[Codebook.MCG],
        "tp": ranks,
        "moe_layers": [layers[0], layers[-1]],
        "experts_per_layer": [
            len(bits.get(layer, ())) for layer in range(layers[-1] + 1)
        ],
        "tensor_schema": TENSOR_SCHEMA,
        "rotation_layout": PER_EXPERT_LAYOUT,
        "bits": "mixed",
        "k_values": values,
        "bits_per_expert": f"{BITS_MAP_FILE}:{BITS_MAP_FIELD}",
        "producer": PRODUCER,
    }


def bits_map(bits: Mapping[int, Sequence[int | float]]) -> dict[str, Any]:
    """The file that `rank_sliced_tail` names: the bits of each expert."""
    return {str(layer): {BITS_MAP_FIELD: list(row)} for layer, row in bits.items()}
