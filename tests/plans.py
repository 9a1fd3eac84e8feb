# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A small checkpoint without weights, to plan and to damage.

One dense layer, one with four routed experts, and one draft layer.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from exl3.checkpoint.plan import CheckpointPlan, read_plan
from exl3.format.errors import CheckpointError
from tests.header_files import Tensors, dense, experts, linear, tail, write_folder

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "vocab_size": 500,
}
L1, L2 = "model.layers.1", "model.layers.2"
E1, E2 = f"{L1}.mlp.experts", f"{L2}.mlp.experts"
HEAD = linear("lm_head", 256, 512)
#: What there must be of layer 0 beside layer 1.
L0_NORM = dense("model.layers.0.input_layernorm", 1, 256)
TAIL = tail(2, (1, 1), 4)


def read(
    folder: Path, tensors: Tensors, shards: int = 1, files: Any = (), **config: Any
) -> CheckpointPlan:
    """Writes a checkpoint, with other files beside it, and reads its plan.

    Layer 0 comes with layer 1.
    """
    if any(name.startswith(f"{L1}.") for name in tensors):
        tensors = L0_NORM | tensors
    write_folder(folder, tensors, CONFIG | config, shards)
    for name, content in dict(files).items():
        (folder / name).write_text(json.dumps(content))
    return read_plan(folder, CONFIG | config)


def refusal(folder: Path, tensors: Tensors, **more: Any) -> str:
    """The line with which such a checkpoint is refused."""
    with pytest.raises(CheckpointError) as error:
        read(folder, tensors, **more)
    line = str(error.value)
    assert "\n" not in line
    return line


def sliced(**kwargs: Any) -> Tensors:
    """The experts of layer 1 in two slices."""
    return experts(L1, 4, ranks=2, **kwargs)


def without(tensors: Tensors, *parts: str) -> Tensors:
    """Only tensors whose names have none of these parts."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not any(part in name for part in parts)
    }
