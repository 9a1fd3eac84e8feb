# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads a checkpoint with every trellis decoded: its dense twin."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from exl3.checkpoint.plan import read_config, read_with_modules
from exl3.codec import decode_weight, expand_signs
from exl3.format.constants import MULTIPLIERS, Codebook
from exl3.format.names import PROJECTIONS, SHARED_H


def read_dense(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint as if it had never been quantized.

    Args:
        folder: The checkpoint's folder, EXL3 or not; it fits into memory.

    Returns:
        Tensors by name. A decoded `weight` is float32 `[n, k]` in stored sizes, which
        are whole blocks of 128; other tensors are as stored.

    Raises:
        CheckpointError: The checkpoint contradicts itself.
    """
    checkpoint, modules = read_with_modules(folder, read_config(folder))
    files = {header.file for fields in modules.values() for header in fields.values()}
    tensors: dict[str, Tensor] = {}
    for file in sorted(files):
        tensors |= load_file(folder / file)
    for module, matrix in checkpoint.plan.linears.items():
        tensors[f"{module}.weight"] = _decode(tensors, module, matrix.codebook)
    for experts, layer in checkpoint.plan.experts.items():
        for spelling, projection in zip(layer.spelling, PROJECTIONS):
            ranks = [f".rank{rank}" for rank in range(layer.ranks)]
            shared = [f"{experts}.{SHARED_H}.{spelling}{rank}" for rank in ranks]
            for expert in range(layer.width):
                module = f"{experts}.{expert}.{spelling}"
                codebook = layer.matrix(expert, projection).codebook
                parts = [
                    _decode(tensors, f"{module}{rank}", codebook, of_all)
                    for rank, of_all in zip(ranks if layer.sliced else [""], shared)
                ]
                # Gate and up are cut by outputs, down by inputs.
                dim = 1 if projection == "down" else 0
                tensors[f"{module}.weight"] = torch.cat(parts, dim)
            for name in shared:
                for field in ("suh", "svh"):
                    tensors.pop(f"{name}.{field}", None)
    return tensors


def _decode(
    tensors: dict[str, Tensor], module: str, codebook: Codebook, shared: str = ""
) -> Tensor:
    """Takes a module's own tensors out, and returns the weight `[n, k]`.

    Args:
        tensors: All tensors by name.
        module: The module's name.
        codebook: The trellis's codebook.
        shared: The name under which experts share what this module has not.
    """
    if codebook in MULTIPLIERS:
        del tensors[f"{module}.{codebook.label}"]

    def scales(field: str, signs: str) -> Tensor:
        if f"{module}.{field}" in tensors:
            return tensors.pop(f"{module}.{field}")
        if f"{module}.{signs}" in tensors:
            return expand_signs(tensors.pop(f"{module}.{signs}"))
        return tensors[f"{shared}.{field}"]

    suh, svh = scales("suh", "su"), scales("svh", "sv")
    return decode_weight(tensors.pop(f"{module}.trellis"), suh, svh, codebook).T
