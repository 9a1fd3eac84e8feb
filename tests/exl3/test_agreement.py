# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Metadata, config and tensors must agree; of a draft, the tensors decide."""

import pytest

from exl3.format.errors import UnsupportedFormatError
from tests.header_files import dense, experts, tail
from tests.plans import CONFIG, E1, E2, HEAD, L1, L2, TAIL, read, refusal, sliced

#: A quantized embedding table, as some writers store it.
EMBEDDINGS = {"model.embed_tokens.signs": ("I16", (8,))}
EMBEDDINGS |= {"model.embed_tokens.trellis": ("I16", (8, 8))}
MIXED = {"bits": "mixed", "k_values": [3, 4], "bits_per_expert": "map.json:k"}


def test_bits_by_expert_are_compared(tmp_path):
    tensors = sliced(bits=lambda expert, at: 3 + expert % 2)
    metadata = {"hybrid_tr3_tail": TAIL | MIXED}
    right = {"map.json": {"1": {"k": [3, 4, 3, 4]}}}
    plan = read(tmp_path / "right", tensors, files=right, **metadata)
    assert plan.experts[E1].matrix(1, "gate").bits == 4
    for number, (content, says) in enumerate(
        [
            ({"1": {"k": [3, 4, 4, 4]}}, "expert 2 is stored with [3, 3, 3] bits"),
            ({"1": {"k": [3, 4, 3]}}, "3 entries in 'k'; expected a list of 4"),
            ({"1": {"k": [3, 4, 3, 5]}}, "gives expert 3 5 bits; hybrid_tr3_tail"),
            ({"1": {"k": [3, 4, 3, True]}}, "gives expert 3 True bits"),
            ({"1": {"k": "3434"}}, "has '3434' in 'k'"),
            ({"1": {"x": [3, 4, 3, 4]}}, "has None in 'k'"),
            ({"1": [3, 4, 3, 4]}, "layer 1 has the entry [3, 4, 3, 4]"),
            ({"2": {"k": [3, 4, 3, 4]}}, "layer 1 has the entry None"),
            ([], "map.json is []; expected an object"),
        ]
    ):
        files = {"map.json": content}
        assert says in refusal(tmp_path / str(number), tensors, files=files, **metadata)
    says = refusal(tmp_path / "absent", tensors, **metadata)
    assert "names 'map.json', which is not in" in says


def test_a_layer_of_the_map_may_say_that_all_experts_have_three_bits(tmp_path):
    files = {"map.json": {"1": {"tail_tr3": [1] * 4}}}
    metadata = {"hybrid_tr3_tail": TAIL | MIXED}
    plan = read(tmp_path, sliced(bits=3), files=files, **metadata)
    assert plan.experts[E1].matrix(0, "gate").bits == 3


def test_one_number_sums_up_projections_that_differ(tmp_path):
    tensors = sliced(bits=lambda expert, at: 3 + at)
    metadata = TAIL | MIXED | {"k_values": [3, 4, 5]}
    files = {"map.json": {"1": {"k": [4, 3, 5, 4]}}}
    plan = read(tmp_path / "a", tensors, files=files, hybrid_tr3_tail=metadata)
    assert [code.bits for code in plan.experts[E1].encodings[0]] == [3, 4, 5]
    says = refusal(
        tmp_path / "b",
        tensors,
        files={"map.json": {"1": {"k": [4, 3, 3, 4]}}},
        hybrid_tr3_tail=metadata | {"k_values": [3, 4]},
    )
    assert "k_values has [3, 4]" in says


@pytest.mark.parametrize("place", ["outer", "inner"])
def test_the_tail_of_a_multimodal_config(tmp_path, place):
    fields = {"hybrid_tr3_tail": TAIL | {"tp": 4}}
    config = {"text_config": CONFIG}
    if place == "outer":
        config |= fields
    else:
        config["text_config"] = CONFIG | fields
    says = refusal(tmp_path, sliced(), **config)
    assert "hybrid_tr3_tail.tp is 4" in says


def test_a_tail_in_its_own_file_is_read_where_the_config_has_none(tmp_path):
    files = {"quantization_config.json": {"rank_sliced": TAIL | {"tp": 4}}}
    assert "hybrid_tr3_tail.tp is 4" in refusal(tmp_path, sliced(), files=files)


def test_slices_without_metadata_are_read_with_a_warning(tmp_path):
    (warning,) = read(tmp_path, sliced()).warnings
    assert "rank-sliced without hybrid_tr3_tail" in warning


@pytest.mark.parametrize(
    ("draft", "layers", "says"),
    [
        (experts(L2, 4, ranks=2), (1, 1), "moe_layers ends before layer 2"),
        (dense(f"{E2}.0.up_proj", 8, 8), (1, 2), "is dense, but hybrid_tr3_tail"),
    ],
)
def test_of_a_draft_the_tensors_decide(tmp_path, draft, layers, says):
    plan = read(tmp_path, sliced() | draft, hybrid_tr3_tail=tail(2, layers, 4))
    assert (E2 in plan.experts) == (layers == (1, 1))
    assert says in plan.warnings[0]


def test_the_metadatas_list_must_reach_the_draft(tmp_path):
    tensors = sliced() | experts(L2, 4, ranks=2)
    says = refusal(tmp_path, tensors, hybrid_tr3_tail=tail(2, (1, 2), [0, 4]))
    assert "gives layer 2 none; set it to 4" in says


def test_files_that_disagree_are_told_and_the_tensors_decide(tmp_path):
    block = {"quant_method": "exl3", "bits": 4.0, "head_bits": 8, "codebook": "mul1"}
    hint = {
        **block,
        "bits": 3.0,
        "tensor_storage": {
            "lm_head": {"quant_format": "exl3", "bits_per_weight": 6},
            "model.norm": {"stored_tensors": {}},
            "gone": {"quant_format": "exl3", "bits_per_weight": 4},
            "odd": 7,
            f"{E1}.1.up_proj": {"quant_format": "exl3", "bits_per_weight": 4},
        },
    }
    plan = read(
        tmp_path,
        HEAD | experts(L1, 4),
        files={"quantization_config.json": hint},
        quantization_config=block | {"ignore": ["lm_head*"]},
    )
    assert plan.linears["lm_head"].bits == 4
    text = "\n".join(plan.warnings)
    assert "bits is 4.0 in config.json and 3.0 in quantization_config.json" in text
    assert "wrong about 1 modules (first 'lm_head': 6 bits, stored with 4)" in text
    assert "head_bits is 8, and lm_head has 4" in text
    assert "codebook is mul1, and the modules have mcg" in text
    assert "ignore has 'lm_head*', but lm_head is EXL3" in text
    assert len(plan.warnings) == 5


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": 384}, "stored for a hidden size of 256"),
        ({"moe_intermediate_size": 512}, "256 intermediate features are stored in all"),
        ({"moe_intermediate_size": 128}, "moe_intermediate_size 128"),
    ],
)
def test_experts_must_be_the_configs(tmp_path, fields, says):
    assert says in refusal(tmp_path, experts(L1, 4), **fields)


def test_stored_sizes_are_the_configs_filled_up_to_blocks(tmp_path):
    plan = read(
        tmp_path,
        experts(L1, 4, intermediate=768),
        moe_intermediate_size=704,
        hidden_size=200,
    )
    assert plan.experts[E1].intermediate == 768


def test_slices_have_no_padding(tmp_path):
    says = refusal(tmp_path, sliced(intermediate=768), moe_intermediate_size=704)
    assert "768 intermediate features" in says and "704" in says


@pytest.mark.parametrize("own", [{}, dense(f"{E2}.0.up_proj", 8, 8)])
def test_experts_that_only_the_metadata_has_are_named(tmp_path, own):
    """The file with a layer's experts is missing, and no index tells."""
    tensors = sliced() | dense("model.layers.2.mlp.gate", 256, 4) | own
    metadata = {"hybrid_tr3_tail": tail(2, (1, 2), 4), "num_hidden_layers": 3}
    says = refusal(tmp_path, tensors, **metadata)
    assert "moe_layers counts layer 2 as rank-sliced" in says


@pytest.mark.parametrize("block", [[1], "exl3", 3, False])
@pytest.mark.parametrize("tensors", [HEAD, dense("lm_head", 256, 500)])
def test_a_quantization_config_is_an_object(tmp_path, tensors, block):
    says = refusal(tmp_path, tensors, quantization_config=block)
    assert f"quantization_config is {block!r}; expected an object" in says


def test_declared_but_not_stored(tmp_path):
    says = refusal(
        tmp_path, dense("a", 8, 8), quantization_config={"quant_method": "exl3"}
    )
    assert "none of its 1 tensors is a trellis" in says


@pytest.mark.parametrize("layer", [0, 2])
def test_a_dense_draft_may_come_with_the_config_of_an_exl3_trunk(tmp_path, layer):
    tensors = dense(f"model.layers.{layer}.mlp.up_proj", 8, 8) | dense("norm", 1, 8)
    if layer < CONFIG["num_hidden_layers"]:
        says = refusal(tmp_path, tensors, hybrid_tr3_tail=TAIL)
        assert "none of its 2 tensors is a trellis" in says
    else:
        assert not read(tmp_path, tensors, hybrid_tr3_tail=TAIL).is_exl3


@pytest.mark.parametrize(
    ("tensors", "files", "config"),
    [
        (HEAD, {"exl3-manifest.json": {}}, {}),
        (HEAD, {}, {"quantization_config": {"scope": "glm53_routed_experts_only"}}),
        (HEAD, {}, {"text_config": {"quantization_config": {"r7_routed_experts": 1}}}),
        (EMBEDDINGS | HEAD, {}, {}),
    ],
)
def test_formats_that_resemble_exl3_are_refused(tmp_path, tensors, files, config):
    with pytest.raises(UnsupportedFormatError):
        read(tmp_path, tensors, files=files, **config)
