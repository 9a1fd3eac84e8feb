# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads an exported checkpoint, or an EXL3 pack of it, back into the torch module."""

import json
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from exl3.model.dense import read_dense
from tools.demo_model.config import ModelConfig
from tools.demo_model.export import WIDTHS_FIELD, hf_name
from tools.demo_model.model import DemoModel


def load_checkpoint(folder: Path) -> DemoModel:
    """The model of a folder, in float32, trellis weights decoded by the reference."""
    config = model_config(json.loads((folder / "config.json").read_text()))
    model = DemoModel(config)
    load_tensors(model, read_dense(folder))
    return model.eval()


def model_config(hf_config: dict) -> ModelConfig:
    """The sizes that a `config.json` states."""
    names = {field.name for field in fields(ModelConfig)}
    sizes = {name: value for name, value in hf_config.items() if name in names}
    dense = hf_config["first_k_dense_replace"]
    moe = hf_config["num_hidden_layers"] + 1 - dense
    widths = hf_config.get(
        WIDTHS_FIELD, [0] * dense + [hf_config["n_routed_experts"]] * moe
    )
    theta = hf_config["rope_parameters"]["rope_theta"]
    return ModelConfig(**sizes, rope_theta=theta, widths=tuple(widths))


@torch.no_grad()
def load_tensors(model: DemoModel, tensors: dict[str, Tensor]) -> None:
    """Copies a checkpoint's tensors into `model`.

    A trellis holds whole blocks of 128: what is beyond a weight's own size is left out.
    """
    for name, value in model.state_dict().items():
        name = hf_name(model.config, name)
        if name.endswith(".mlp.gate_up"):
            prefix = name.removesuffix("gate_up") + "experts"
            for expert, rows in enumerate(value):
                for part, half in zip(("gate", "up"), rows.chunk(2)):
                    _fill(half, tensors[f"{prefix}.{expert}.{part}_proj.weight"])
        elif name.endswith(".mlp.down"):
            prefix = name.removesuffix("down") + "experts"
            for expert, rows in enumerate(value):
                _fill(rows, tensors[f"{prefix}.{expert}.down_proj.weight"])
        else:
            _fill(value, tensors[name])


def _fill(place: Tensor, stored: Tensor) -> None:
    place.copy_(stored[tuple(slice(size) for size in place.shape)])
