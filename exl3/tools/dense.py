# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads a checkpoint with every trellis decoded: its dense twin."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from exl3.checkpoint.headers import read_folder
from exl3.checkpoint.plan import read_plan
from exl3.codec import decode_weight
from exl3.format.constants import MULTIPLIERS, Codebook
from exl3.format.names import PROJECTIONS


def read_dense(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint as if it had never been quantized.

    Args:
        folder: The checkpoint's folder, EXL3 or not; it fits into memory. Legacy signs
            (`su`, `sv`) and shared vectors (`shared_h`) are not read: no writer here
            makes them.

    Returns:
        Tensors by name. A decoded `weight` is float32 `[n, k]` in stored sizes, which
        are whole blocks of 128; other tensors are as stored.

    Raises:
        CheckpointError: The checkpoint contradicts itself.
    """
    plan = read_plan(folder, json.loads((folder / "config.json").read_text()))
    tensors: dict[str, Tensor] = {}
    for file in sorted({header.file for header in read_folder(folder)}):
        tensors |= load_file(folder / file)
    for module, matrix in plan.linears.items():
        tensors[f"{module}.weight"] = _decode(tensors, module, matrix.codebook)
    for experts, layer in plan.experts.items():
        for expert in range(layer.width):
            for spelling, projection in zip(layer.spelling, PROJECTIONS):
                module = f"{experts}.{expert}.{spelling}"
                codebook = layer.matrix(expert, projection).codebook
                slices = [f"{module}.rank{rank}" for rank in range(layer.ranks)]
                parts = [
                    _decode(tensors, name, codebook)
                    for name in (slices if layer.sliced else [module])
                ]
                # Gate and up are cut by outputs, down by inputs.
                dim = 1 if projection == "down" else 0
                tensors[f"{module}.weight"] = torch.cat(parts, dim)
    return tensors


def _decode(tensors: dict[str, Tensor], module: str, codebook: Codebook) -> Tensor:
    """Takes a module's own tensors out, and returns the weight `[n, k]`."""
    if codebook in MULTIPLIERS:
        del tensors[f"{module}.{codebook.label}"]
    trellis, suh, svh = (
        tensors.pop(f"{module}.{field}") for field in ("trellis", "suh", "svh")
    )
    return decode_weight(trellis, suh, svh, codebook).T
