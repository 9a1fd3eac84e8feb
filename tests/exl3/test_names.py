# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Names of tensors are taken apart alike in every family of models."""

import pytest

from exl3.format.names import layer_of, parse_name

FIELDS = ("module", "experts", "expert", "projection", "rank", "field")
E3 = "model.layers.3.mlp.experts"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lm_head.trellis", ("lm_head", None, None, None, None, "trellis")),
        (
            "model.layers.0.self_attn.q_proj.suh",
            ("model.layers.0.self_attn.q_proj", None, None, None, None, "suh"),
        ),
        (
            f"{E3}.7.gate_proj.trellis",
            (f"{E3}.7.gate_proj", E3, "7", "gate_proj", None, "trellis"),
        ),
        (
            f"{E3}.7.w2.rank12.mcg",
            (f"{E3}.7.w2", E3, "7", "w2", "12", "mcg"),
        ),
        (
            f"{E3}.shared_h.down_proj.rank0.svh",
            (f"{E3}.shared_h.down_proj", E3, "shared_h", "down_proj", "0", "svh"),
        ),
        (
            "model.language_model.layers.3.mlp.experts.0.up_proj.rank1.suh",
            (
                "model.language_model.layers.3.mlp.experts.0.up_proj",
                "model.language_model.layers.3.mlp.experts",
                "0",
                "up_proj",
                "1",
                "suh",
            ),
        ),
        (
            "model.layers.1.mlp.shared_experts.up_proj.weight",
            (
                "model.layers.1.mlp.shared_experts.up_proj",
                None,
                None,
                None,
                None,
                "weight",
            ),
        ),
        (f"{E3}.gate_up_proj", (E3, None, None, None, None, "gate_up_proj")),
        (f"{E3}.0.fc1.trellis", (f"{E3}.0.fc1", None, None, None, None, "trellis")),
        ("lm_head.rank0.suh", ("lm_head", None, None, None, "0", "suh")),
        ("mtp.rank.weight", ("mtp.rank", None, None, None, None, "weight")),
    ],
)
def test_names_are_taken_apart(name, parts):
    match = parse_name(name)
    assert match is not None
    assert match.group(*FIELDS) == parts


@pytest.mark.parametrize("name", ["", "weight", ".", "x.", ".x"])
def test_what_belongs_to_no_module(name):
    assert parse_name(name) is None


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("model.layers.12.mlp.experts", 12),
        ("layers.3", 3),
        ("mtp.layers.0.mlp", 78),
        ("model.mtp.layers.1", 79),
        ("lm_head", None),
        ("model.layers.x", None),
        ("model.sublayers.3.mlp", None),
        ("model.layers.1234567.mlp", None),
    ],
)
def test_layers_are_counted_over_the_draft_too(module, layer):
    assert layer_of(module, 78) == layer
