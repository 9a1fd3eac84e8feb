# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Every spelling of the widths is read, and every contradiction is named."""

import pytest

from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.layers import LayerPlan
from exl3.checkpoint.stored_widths import read_stored
from exl3.format.errors import CheckpointError
from tests.checkpoints import GLM_52
from tests.exl3.widths import BASE, gates, resolve

WIDTHS = (0, 8, 4, 6, 5, 3)


SPELLINGS = {
    "list by index": {"n_routed_experts_per_layer": [0, 8, 4, 6, 5]},
    "list by index, null for dense": {"n_routed_experts_per_layer": [None, 8, 4, 6, 5]},
    "list by index with draft": {"n_routed_experts_per_layer": [0, 8, 4, 6, 5, 3]},
    "list of MoE layers": {"n_routed_experts_per_layer": [8, 4, 6, 5]},
    "list of MoE layers with draft": {"n_routed_experts_per_layer": [8, 4, 6, 5, 3]},
    "object, scalar is the rest": {
        "n_routed_experts_per_layer": {"2": 4, "3": 6, "4": 5, "5": 3}
    },
    "num_experts_per_layer": {"num_experts_per_layer": [0, 8, 4, 6, 5]},
    "per_layer_num_experts": {"per_layer_num_experts": [0, 8, 4, 6, 5]},
    "num_local_experts_per_layer": {"num_local_experts_per_layer": [0, 8, 4, 6, 5]},
    "reap_pruning": {"reap_pruning": {"n_routed_experts_per_layer": [8, 4, 6, 5, 3]}},
    "hybrid_tr3_tail": {"hybrid_tr3_tail": {"experts_per_layer": [0, 8, 4, 6, 5]}},
    "two fields that agree": {
        "n_routed_experts_per_layer": {"2": 4, "3": 6, "4": 5, "5": 3},
        "reap_pruning": {"n_routed_experts_per_layer": [8, 4, 6, 5]},
    },
}


@pytest.mark.parametrize("fields", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("scalar", [8, 256, 3], ids=["widest", "original", "narrowest"])
def test_spelling_with_headers(fields, scalar):
    if "object" in str(fields) or isinstance(
        fields.get("n_routed_experts_per_layer"), dict
    ):
        scalar = 8  # stands for the layers that the object leaves out
    config = {**BASE, "n_routed_experts": scalar, **fields}
    assert resolve(config, gates(WIDTHS)) == WIDTHS


@pytest.mark.parametrize("fields", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_spelling_without_headers(fields):
    widths = resolve({**BASE, **fields})
    assert widths[:5] == WIDTHS[:5]
    assert widths[5] in (3, 8)  # the field's, or the model-wide one


def test_a_config_without_the_fields_is_left_alone():
    assert resolve(BASE, gates([0, 8, 8, 8, 8, 8])) is None
    assert resolve(BASE) is None


def test_the_draft_has_its_own_width():
    assert resolve(BASE, gates([0, 8, 8, 8, 8, 4])) == (0, 8, 8, 8, 8, 4)


def test_a_draft_that_is_not_stored_is_no_error():
    config = {**BASE, "n_routed_experts_per_layer": [0, 8, 4, 6, 5]}
    assert resolve(config, gates([0, 8, 4, 6, 5])) == (0, 8, 4, 6, 5, 8)


def test_a_folder_that_holds_the_draft_alone():
    config = {**BASE, "n_routed_experts_per_layer": [0, 8, 4, 6, 5]}
    assert resolve(config, gates([0, 0, 0, 0, 0, 7])) == (0, 8, 4, 6, 5, 7)


def test_mtp_names_of_qwen():
    headers = [
        *gates([8, 4]),
        TensorHeader("mtp.layers.0.mlp.gate.weight", "F32", (6, 16), "m.safetensors"),
    ]
    config = {
        "num_hidden_layers": 2,
        "mtp_num_hidden_layers": 1,
        "num_experts": 8,
        "num_experts_per_layer": [8, 4],
    }
    assert resolve(config, headers) == (8, 4, 6)


def test_a_draft_that_the_config_does_not_count():
    """Qwen3-Next's config has no field for it; the engine builds it all the same."""
    draft = TensorHeader("mtp.layers.0.mlp.gate.weight", "F32", (6, 16), "m")
    config = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_layer": [8, 4]}
    assert resolve(config, [*gates([8, 4]), draft]) == (8, 4, 6)
    assert resolve(config, gates([8, 4])) == (8, 4)


def test_scales_of_a_gate_are_no_gate():
    scales = [
        TensorHeader(f"model.layers.1.mlp.gate.{name}", "F32", (1,), "m")
        for name in ("weight_scale", "weight_scale_inv", "e_score_correction_bias_x")
    ]
    assert resolve(BASE, [*gates([0, 8, 8, 8, 8, 8]), *scales]) is None


REFUSED = {
    "a width off by one": (
        {"n_routed_experts_per_layer": [0, 8, 4, 7, 5, 3]},
        WIDTHS,
        [
            "layer 3",
            "width of 7",
            "6 rows",
            "n_routed_experts_per_layer",
            "[0, 8, 4, 6",
        ],
    ),
    "the draft's width": (
        {"n_routed_experts_per_layer": [0, 8, 4, 6, 5, 4]},
        WIDTHS,
        ["layer 5", "width of 4", "3 rows"],
    ),
    "the scalar alone": (
        {},
        [0, 8, 8, 6, 8, 8],
        ["layer 3", "width of 8", "6 rows", "model.layers.3.mlp.gate.weight"],
    ),
    "the second of two fields": (
        {
            "n_routed_experts_per_layer": [0, 8, 4, 6, 5, 3],
            "reap_pruning": {"n_routed_experts_per_layer": [8, 4, 6, 6, 3]},
        },
        WIDTHS,
        ["reap_pruning", "layer 4", "width of 6", "5 rows"],
    ),
    "a layer that the model has not": (
        {"n_routed_experts_per_layer": {"6": 4}},
        WIDTHS,
        ["key 6", "5 layers", "1 draft"],
    ),
    "two fields that disagree, and no headers": (
        {
            "n_routed_experts_per_layer": [0, 8, 4, 6, 5],
            "reap_pruning": {"n_routed_experts_per_layer": [8, 4, 6, 6]},
        },
        [],
        ["n_routed_experts_per_layer and reap_pruning", "5", "6"],
    ),
    "more groups than there are": (
        {"n_group": 2, "topk_group": 4},
        WIDTHS[:0],
        ["topk_group 4", "n_group 2"],
    ),
    "a length that nothing explains": (
        {"n_routed_experts_per_layer": [8, 4, 6]},
        WIDTHS,
        ["3 entries", "5 layers", "1 draft"],
    ),
    "no list": (
        {"n_routed_experts_per_layer": "8,4,6"},
        WIDTHS,
        ["'8,4,6'", "expected a list"],
    ),
    "no count": (
        {"n_routed_experts_per_layer": [0, 8, 4.5, 6, 5]},
        WIDTHS,
        ["layer 2", "4.5"],
    ),
    "a negative count": (
        {"n_routed_experts_per_layer": [0, 8, -4, 6, 5]},
        WIDTHS,
        ["layer 2", "-4"],
    ),
    "no layer index": (
        {"n_routed_experts_per_layer": {"two": 4}},
        WIDTHS,
        ["'two'"],
    ),
    "no experts": (
        {"n_routed_experts_per_layer": [0, 8, 0, 6, 5]},
        [],
        ["layer 2 has 0", "num_experts_per_tok 2"],
    ),
    "a list in the field for all layers": (
        {"n_routed_experts": [0, 8, 4, 6, 6]},
        WIDTHS,
        ["n_routed_experts_per_layer", "layer 4", "6", "5 rows"],
    ),
    "widths in per_layer_config": (
        {"per_layer_config": {"3": {"n_routed_experts": 7}}},
        [0, 8, 8, 6],
        ["layer 3", "7", "6 rows"],
    ),
    "two fields for each layer": (
        {"n_routed_experts": [8, 4], "n_routed_experts_per_layer": [0, 8]},
        [],
        ["n_routed_experts gives", "[8, 4]", "is [0, 8]", "keep the right one"],
    ),
    "two fields for all layers": (
        {"num_experts": 16},
        [],
        ["n_routed_experts and num_experts", "8 and 16"],
    ),
    "no expert a token": (
        {"num_experts_per_tok": 0},
        [],
        ["layer 1 has 8", "num_experts_per_tok 0"],
    ),
    "no group a token": (
        {"n_group": 2, "topk_group": 0},
        [],
        ["topk_group is 0", "n_group 2"],
    ),
    "experts in a dense layer": (
        {"first_k_dense_replace": 2},
        [0, 8, 8, 8, 8],
        ["layer 1 is dense", "model.layers.1.mlp.gate.weight in model.safetensors"],
    ),
    "layers past the last": (
        {"num_hidden_layers": 3},
        [0, 8, 8, 8, 8],
        ["3 layers and 1 draft layers", "model.layers.4.mlp.gate.weight", "layer 4"],
    ),
    "fewer than top-k": (
        {"num_experts_per_tok": 4},
        WIDTHS,
        ["layer 5 has 3", "num_experts_per_tok 4"],
    ),
    "an index of many digits": (
        {"n_routed_experts_per_layer": {"9" * 5000: 4}},
        WIDTHS,
        ["no layer index"],
    ),
    "dense layers that are no list": (
        {"mlp_only_layers": 1},
        WIDTHS,
        ["mlp_only_layers is 1", "list of layer indices"],
    ),
    "dense layers that are no indices": (
        {"mlp_only_layers": [[1]]},
        WIDTHS,
        ["mlp_only_layers is [[1]]"],
    ),
    "no layers": ({"num_hidden_layers": None}, [], ["num_hidden_layers", "None"]),
    "a million layers": ({"num_hidden_layers": 10**6}, [], ["num_hidden_layers"]),
}


@pytest.mark.parametrize(("fields", "stored", "says"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_both_sides(fields, stored, says):
    if "fewer" in str(says) or "layer 5 has 3" in says:
        fields = {**fields, "n_routed_experts_per_layer": list(WIDTHS)}
    headers = gates(stored)
    config = {**BASE, **fields}
    with pytest.raises(CheckpointError) as refusal:
        resolve_widths(config, read_stored(headers, 5))
    message = str(refusal.value)
    assert [part for part in says if part not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize("by_layer", [[0, 8, 4, 6, 5], {"2": 4, "3": 6, "4": 5}])
def test_widths_by_layer_in_the_field_for_all_layers(by_layer):
    config = {**BASE, "n_routed_experts": by_layer}
    widths = (0, 8, 4, 6, 5) if isinstance(by_layer, list) else (0, 6, 4, 6, 5)
    assert resolve(config, gates(widths))[:5] == widths


@pytest.mark.parametrize("value", ["8", 8.0, float("nan"), True, -8, 10**30])
def test_a_width_that_is_no_count_is_refused(value):
    says = r"^config\.json: n_routed_experts is .*; expected a count"
    with pytest.raises(CheckpointError, match=says):
        resolve({**BASE, "n_routed_experts": value}, gates([0, 8, 8, 8, 8]))


@pytest.mark.parametrize(
    "field",
    [
        "num_hidden_layers",
        "num_nextn_predict_layers",
        "first_k_dense_replace",
        "moe_layer_freq",
        "decoder_sparse_step",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
    ],
)
@pytest.mark.parametrize(
    "value", ["1", [1], {"a": 1}, float("nan"), -1, True, 1.5, 10**30, [1] * 10**6]
)
def test_a_count_that_is_none_is_refused_by_field(field, value):
    with pytest.raises(
        CheckpointError, match=rf"^config\.json: {field} is "
    ) as refusal:
        resolve_widths({**BASE, field: value}, read_stored((), 5))
    assert len(str(refusal.value)) < 200


def test_layers_of_qwen():
    config = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert LayerPlan.from_config(config).moe_layers == (1, 5)


def test_layers_by_type_and_frequency():
    types = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]}
    assert LayerPlan.from_config(types).moe_layers == (1,)
    frequency = {
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 2,
    }
    assert LayerPlan.from_config(frequency).moe_layers == (2, 4)


def test_the_published_shape():
    """The 20-layer GLM-5.2 of 724 experts, the published unequal checkpoint."""
    config = {
        "num_hidden_layers": 20,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_routed_experts_per_layer": GLM_52,
    }
    resolved = resolve(config, gates(GLM_52))
    assert list(resolved) == GLM_52
    assert sum(resolved) == 724
