# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads a checkpoint with every trellis decoded: its dense twin."""

from pathlib import Path

from torch import Tensor

from exl3.format.names import EXL3_FIELDS
from exl3.model.tensors import TensorSource


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
    source = TensorSource.open(folder)
    plan = source.plan
    own = EXL3_FIELDS | {"trellis"}
    tensors = {
        name: source.read(name)
        for name in source.names()
        if name.rpartition(".")[2] not in own and not plan.is_superseded(name)
    }
    modules = list(plan.linears)
    for experts, layer in plan.experts.items():
        modules += [
            f"{experts}.{expert}.{spelling}"
            for expert in range(layer.width)
            for spelling in layer.spelling
        ]
    return tensors | {f"{module}.weight": source.dense(module) for module in modules}
