# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Routers and experts that are stored must belong together."""

import pytest

from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.stored_widths import read_stored
from exl3.format.errors import CheckpointError
from tests.exl3.widths import BASE, gates, resolve


@pytest.mark.parametrize("draft", [4, 5])
def test_routers_and_experts_come_together(draft):
    """Of a draft the rest may lie elsewhere."""
    config = {**BASE, "num_hidden_layers": draft}
    one = [
        TensorHeader(
            f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight", "F32", (), ""
        )
        for layer in range(1, 4)
        for e in range(8)
    ]
    held = gates([0, 8, 8, 8])
    assert resolve(config, held + one) is None
    with pytest.raises(CheckpointError, match="layer 3: no router's gate is stored"):
        resolve(config, held[:2] + one)
    with pytest.raises(CheckpointError, match="layer 3: no routed expert is stored"):
        resolve(config, held + one[:16])
    assert resolve(config, held) is None  # a family may name its experts otherwise
    if draft == 4:
        extra = gates([0, 0, 0, 0, 8])
        assert resolve(config, [*held, *one, *extra]) is None


def tensor(name, *shape, file="m.safetensors"):
    return TensorHeader(f"model.layers.1.mlp.{name}", "F32", shape, file)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (
            [tensor("gate.e_score_correction_bias", 8, file="n.safetensors")],
            ["[8]", "[6, 16]", "m.safetensors", "n.safetensors"],  # case 14
        ),
        (
            [tensor(f"experts.{i}.up_proj.weight", 4, 4) for i in range(5)],
            ["6 rows", "5 routed", "expert 5 is missing"],
        ),
        (
            [tensor(f"experts.{i}.up_proj.weight", 4, 4) for i in range(7)],
            ["6 rows", "7 routed", "expert 6 has no row"],
        ),
        (
            [tensor("gate.weight", 2**47, 16), tensor("experts.1.up_proj.weight", 4)],
            ["140737488355328 rows", "expert 0 is missing"],
        ),
        ([tensor("experts.gate_up_proj", 8, 4, 4)], ["[8, 4, 4]", "[6, 16]"]),
        ([tensor("gate.weight", 6)], ["shape [6]"]),
    ],
)
def test_parts_of_a_layer_must_agree(extra, says):
    config = {"num_hidden_layers": 2, "n_routed_experts": 6}
    headers = [
        TensorHeader("model.layers.0.mlp.gate.weight", "F32", (6, 16), "m.safetensors"),
        tensor("gate.weight", 6, 16),
        *extra,
    ]
    with pytest.raises(CheckpointError) as refusal:
        resolve(config, headers)
    assert [part for part in says if part not in str(refusal.value)] == []


def test_an_index_of_many_digits_names_no_layer():
    name = f"model.layers.{'9' * 5000}.mlp.gate.weight"
    assert not read_stored([TensorHeader(name, "F32", (8, 16), "m")], 5).gates
