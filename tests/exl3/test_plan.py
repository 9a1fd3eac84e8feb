# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The plan is read from names and shapes; what contradicts them is refused by name."""

import json
import pickle

import pytest

from exl3.checkpoint.plan import read_checkpoint, read_plan
from exl3.format.constants import Codebook
from exl3.format.errors import CheckpointError
from tests.header_files import (
    SHARED_H_SCHEMA,
    dense,
    experts,
    linear,
    tail,
    write_folder,
)
from tests.plans import (
    CONFIG,
    E1,
    E2,
    HEAD,
    L0_NORM,
    L1,
    L2,
    TAIL,
    read,
    refusal,
    sliced,
    without,
)

# --- Linear modules ----------------------------------------------------------------


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_all_bits_and_codebooks(tmp_path, codebook, bits):
    plan = read(tmp_path, linear("lm_head", 256, 512, bits, codebook))
    matrix = plan.linears["lm_head"]
    assert (matrix.in_features, matrix.out_features) == (256, 512)
    assert (matrix.bits, matrix.words) == (bits, 16 * bits)
    assert matrix.codebook.label == codebook
    assert plan.is_exl3
    assert not plan.warnings


@pytest.mark.parametrize("bits", [1.5, 2.5, 3.5])
def test_half_rates_are_mul1s(tmp_path, bits):
    plan = read(tmp_path / "mul1", linear("lm_head", 256, 512, bits, "mul1"))
    assert plan.linears["lm_head"].bits == bits
    for codebook in ("mcg", "3inst"):
        tensors = linear("lm_head", 256, 512, bits, codebook)
        says = refusal(tmp_path / codebook, tensors)
        assert f"{bits} bits per weight" in says
        assert "only mul1 has half rates" in says


def test_legacy_signs_and_bias(tmp_path):
    tensors = linear("model.layers.0.mlp.down_proj", 256, 384)
    del tensors["model.layers.0.mlp.down_proj.suh"]
    tensors["model.layers.0.mlp.down_proj.su"] = ("I16", (16,))
    tensors["model.layers.0.mlp.down_proj.bias"] = ("F16", (384,))
    (matrix,) = read(tmp_path, tensors, num_hidden_layers=1).linears.values()
    assert matrix.has_bias
    assert (matrix.in_features, matrix.out_features) == (256, 384)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trellis": None}, "no trellis"),
        ({"trellis": ("I32", (16, 32, 64))}, "lm_head.trellis is I32"),
        ({"trellis": ("I16", (16, 32))}, "of shape [16, 32]; expected I16"),
        ({"trellis": ("I16", (16, 32, 60))}, "tiles of 60 words"),
        ({"trellis": ("I16", (16, 32, 144))}, "9 bits per weight"),
        ({"trellis": ("I16", (16, 32, 0))}, "0 bits per weight"),
        ({"trellis": ("I16", (12, 32, 64))}, "192 in-features; expected a multiple"),
        ({"trellis": ("I16", (16, 0, 64))}, "0 out-features; expected a multiple"),
        ({"suh": None}, "neither suh nor su"),
        ({"svh": None}, "neither svh nor sv"),
        ({"suh": ("F16", (128,))}, "lm_head.suh is F16 of shape [128]; expected"),
        ({"suh": ("BF16", (256,))}, "lm_head.suh is BF16"),
        ({"svh": ("F16", (512, 1))}, "lm_head.svh is F16 of shape [512, 1]"),
        ({"su": ("I16", (16,))}, "both lm_head.suh"),
        ({"sv": ("I16", (32,))}, "both lm_head.svh"),
        ({"svh": None, "sv": ("I16", (31,))}, "lm_head.sv is I16 of shape [31]"),
        ({"mcg": ("I32", (2,))}, "lm_head.mcg is I32 of shape [2]; expected one I32"),
        ({"mcg": ("F16", ())}, "lm_head.mcg is F16"),
        ({"mul1": ("I32", ())}, "both lm_head.mcg"),
        ({"bias": ("F16", (500,))}, "lm_head.bias is F16 of shape [500]"),
        ({"scale": ("F16", (1,))}, "lm_head.scale"),
        ({"signs": ("I16", (1,))}, "quantized embedding table"),
        ({"weight_scale": ("F32", (1,))}, "lm_head.weight_scale"),
    ],
)
def test_a_wrong_tensor_of_a_matrix_is_named(tmp_path, change, says):
    # Another module keeps the checkpoint EXL3 when this one loses its trellis.
    tensors = HEAD | linear("model.layers.0.mlp.down_proj", 256, 256)
    for field, tensor in change.items():
        tensors.pop(f"lm_head.{field}", None)
        if tensor is not None:
            tensors[f"lm_head.{field}"] = tensor
    assert says in refusal(tmp_path, tensors)


@pytest.mark.parametrize("vocabulary", [384, 513])
def test_the_head_must_be_the_configs(tmp_path, vocabulary):
    says = refusal(tmp_path, HEAD, vocab_size=vocabulary)
    assert "lm_head" in says and "256 x 512" in says
    assert f"vocab_size {vocabulary}" in says


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (dense("a.q_proj", 8, 8, "F8_E4M3"), "a.q_proj.weight belongs to another"),
        ({"a.q_proj.weight_scale_2": ("F32", ())}, "(NVFP4)"),
        ({"a.q_proj.qweight": ("I32", (1, 1))}, "(GPTQ or AWQ)"),
        ({f"{E2}.0.up_proj.weight_packed": ("U8", (8,))}, "(compressed-tensors)"),
    ],
)
def test_other_quantizations_beside_exl3_are_named(tmp_path, tensors, says):
    assert says in refusal(tmp_path, HEAD | tensors)


def test_a_fused_module_is_stored_in_one_way(tmp_path):
    tensors = linear("a.q_proj", 256, 256) | dense("a.k_proj", 256, 256)
    says = refusal(tmp_path, tensors | dense("a.v_proj", 256, 256))
    assert "a.k_proj: is dense" in says and "a.q_proj is EXL3" in says


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("lm_head.rank0", "only routed experts are stored in slices"),
        (f"{L1}.mlp.shared_experts.up_proj.rank0", "only routed experts"),
        (f"{E1}.0.fc1", "gate_proj, up_proj, down_proj"),
        (f"{E1}.gate_up_proj", "routed experts are stored one by one"),
        (f"{E1}.r7_shared", "r7_shared"),
    ],
)
def test_a_name_that_no_model_has_is_refused(tmp_path, module, says):
    assert says in refusal(tmp_path, HEAD | linear(module, 256, 256))


# --- Routed experts ----------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")]
)
def test_whole_experts_each_with_bits_of_its_own(tmp_path, spelling):
    tensors = experts(
        L1, 4, spelling=spelling, bits=lambda expert, at: 3 + (expert + at) % 4
    )
    layer = read(tmp_path, tensors).experts[E1]
    assert (layer.width, layer.ranks, layer.sliced) == (4, 1, False)
    assert (layer.hidden, layer.intermediate) == (256, 256)
    assert layer.spelling == spelling
    assert [code.bits for code in layer.encodings[2]] == [5, 6, 3]
    assert layer.matrix(1, "up") == (80, Codebook.MCG)
    assert layer.shape("up") == (256, 256)


def test_sliced_experts_of_trunk_and_draft(tmp_path):
    tensors = sliced(bits=3) | experts(L2, 3, ranks=2, bits=4)
    plan = read(
        tmp_path,
        tensors,
        shards=3,
        hybrid_tr3_tail=tail(2, (1, 2), [0, 4, 3], **BY_LAYER),
        quantization_config={"quant_method": "modelopt", "ignore": ["lm_head"]},
    )
    one, two = plan.experts[E1], plan.experts[E2]
    assert (one.width, one.ranks, one.sliced, one.intermediate) == (4, 2, True, 128)
    assert (two.width, two.matrix(2, "down").bits) == (3, 4)
    assert plan.warnings == ()
    assert one.shape("down") == (128, 256)
    assert pickle.loads(pickle.dumps(plan)) == plan


BY_LAYER = {"trellis_bits_by_layer": {"1": 3, "2": 4}}


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (without(sliced(), "experts.2.up_proj.rank1"), "expert 2 has no trellis of"),
        (without(sliced(), "rank1"), "stored in 1 slices, but hybrid_tr3_tail.tp is 2"),
        (without(sliced(), "rank0"), "no trellis of its gate projection for rank 0"),
        (without(sliced(), "experts.1."), "expert 1 has no trellis"),
        (without(sliced(), "experts.3."), "3 routed experts are stored"),
        (without(sliced(), "1.up_proj.rank1.suh"), "neither suh nor su"),
        (without(sliced(), "0.up_proj.rank1.mcg"), "rank 0 and 4 (3inst) in rank 1"),
        (without(sliced(), ".mcg"), "codebook 3inst"),
        (sliced(codebook="mul1"), "codebook mul1"),
        (sliced(bits=3), "[3, 3, 3] bits in gate, up and down, but hybrid_tr3_tail"),
        (
            sliced() | linear(f"{E1}.0.up_proj", 256, 128),
            "one rank's slice and",
        ),
        (
            without(sliced(), "3.up_proj") | dense(f"{E1}.3.up_proj", 256, 128),
            "expert 3 has a dense up projection",
        ),
        (
            sliced() | linear(f"{E1}.1.up_proj.rank1", 256, 256),
            "rank 1 of expert 1's up projection has 256 hidden and 256 intermediate",
        ),
        (
            sliced() | linear(f"{E1}.1.up_proj.rank1", 256, 128, bits=5),
            "4 bits (mcg) in rank 0 and 5 (mcg) in rank 1",
        ),
        (sliced() | linear(f"{E1}.0.w1.rank0", 256, 128), "a projection has one name"),
        (sliced() | linear(f"{E1}.00.up_proj.rank0", 256, 128), "leading zeros"),
        (sliced() | linear(f"{E1}.0.up_proj.rank00", 256, 128), "leading zeros"),
        (sliced() | {f"{E1}.0.up_proj.rank0.bias": ("F16", (128,))}, "with a bias"),
        (sliced() | linear(f"{E1}.999999.up_proj.rank0", 256, 128), "up to 999999"),
        (sliced() | linear(f"{E1}.0.up_proj.rank9999", 256, 128), "rank 2 of 10000"),
        (
            sliced() | {f"{E1}.shared_h.up_proj.rank0.suh": ("F16", (256,))},
            "stored beside suh of shared_h",
        ),
        (experts(L1, 4), "is stored whole, but hybrid_tr3_tail.moe_layers counts"),
        (HEAD | dense(f"{E1}.0.up_proj", 256, 256), "is dense, but hybrid_tr3_tail"),
        (
            sliced() | experts("model.layers.0", 4, ranks=2),
            "moe_layers begins after it",
        ),
    ],
)
def test_what_is_wrong_with_sliced_experts_is_named(tmp_path, tensors, says):
    assert says in refusal(tmp_path, tensors, hybrid_tr3_tail=TAIL)


def shared_h(ranks=2, hidden=256):
    """Sliced experts without hidden-side vectors of their own, and the shared ones."""
    sides = ("gate_proj", "suh"), ("up_proj", "suh"), ("down_proj", "svh")
    tensors = {
        name: tensor
        for name, tensor in sliced().items()
        if not any(f".{part}." in name and name.endswith(of) for part, of in sides)
    }
    for part, of in sides:
        for rank in range(ranks):
            tensors[f"{E1}.shared_h.{part}.rank{rank}.{of}"] = ("F16", (hidden,))
    return tensors


SHARED = TAIL | {
    "rotation_layout": "shared_h_v1",
    "shared_h_tensor_schema": SHARED_H_SCHEMA,
}


def test_shared_vectors(tmp_path):
    layer = read(tmp_path, shared_h(), hybrid_tr3_tail=SHARED).experts[E1]
    assert layer.shared_h
    assert layer.width == 4


@pytest.mark.parametrize(
    ("tensors", "metadata", "says"),
    [
        (shared_h(), TAIL, "has the vectors that shared_h_v1 has"),
        (sliced(), SHARED, "lacks the vectors that shared_h_v1 has"),
        (shared_h(ranks=1), SHARED, "the down projection's rank 1 is missing"),
        (shared_h(ranks=3), SHARED, "the down projection's rank 2 is of no slice"),
        (shared_h(hidden=128), SHARED, "is F16 of shape [128]; expected F16 of shape"),
        (
            shared_h() | {f"{E1}.shared_h.up_proj.rank0.svh": ("F16", (256,))},
            SHARED,
            "shared_h.up_proj.rank0.svh is not a vector",
        ),
        (
            shared_h() | {f"{E1}.shared_h.up_proj.suh": ("F16", (256,))},
            SHARED,
            "shared_h.up_proj.suh is not a vector",
        ),
        (
            shared_h() | {f"{E1}.3.down_proj.rank1.svh": ("F16", (256,))},
            SHARED,
            "3.down_proj.rank1.svh is stored beside svh of shared_h",
        ),
    ],
)
def test_what_is_wrong_with_shared_vectors_is_named(tmp_path, tensors, metadata, says):
    assert says in refusal(tmp_path, tensors, hybrid_tr3_tail=metadata)


# --- What is dense, and what is superseded -----------------------------------------


def test_a_dense_checkpoint_has_an_empty_plan(tmp_path):
    tensors = dense("model.su", 8, 8) | {"model.mcg": ("BF16", (1,))}
    tensors |= dense("x", 8, 8, "F8_E4M3")
    plan = read(tmp_path, tensors, shards=2)
    assert not plan.is_exl3
    assert plan.warnings == ()


def test_dense_weights_beside_their_trellis_are_dropped(tmp_path):
    stale = dense(f"{E1}.0.up_proj", 256, 256) | dense("lm_head", 256, 500)
    stale[f"{E1}.gate_up_proj"] = ("BF16", (4, 512, 256))
    tensors = HEAD | experts(L1, 4) | stale | dense("model.norm", 1, 256)
    plan = read(tmp_path, tensors)
    assert {name for name in tensors if plan.is_superseded(name)} == set(stale)
    (warning,) = plan.warnings
    assert "lm_head.weight and 2 more dense weights" in warning


def test_the_index_may_leave_out_a_superseded_weight_only(tmp_path):
    tensors = experts(L1, 4) | dense(f"{E1}.0.up_proj", 256, 256)
    tensors |= L0_NORM | dense("model.norm", 1, 256)
    write_folder(tmp_path, tensors, CONFIG, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][f"{E1}.0.up_proj.weight"]
    index.write_text(json.dumps(content))
    assert read_plan(tmp_path, CONFIG).is_superseded(f"{E1}.0.up_proj.weight")
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"does not place there: model\.norm"):
        read_plan(tmp_path, CONFIG)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_trellis_gate_is_as_wide_as_its_router_says(tmp_path, has_bias):
    tensors = without(experts(L1, 3), "mlp.gate.weight")
    tensors |= linear(f"{L1}.mlp.gate", 256, 128)
    if has_bias:
        tensors[f"{L1}.mlp.gate.e_score_correction_bias"] = ("F32", (3,))
    write_folder(tmp_path, L0_NORM | tensors)
    checkpoint = read_checkpoint(tmp_path, CONFIG)
    assert checkpoint.widths.gates[1].shape[0] == 3
    assert f"{L1}.mlp.gate" in checkpoint.plan.linears


@pytest.mark.parametrize("layers", [2, 3, 9])
def test_a_layer_of_which_nothing_is_stored_is_named(tmp_path, layers):
    tensors = experts(L1, 4) | dense(f"model.layers.{layers}.eh_proj", 512, 256)
    if layers == 2:
        write_folder(tmp_path, tensors, CONFIG)  # layer 0 does not come with it
        with pytest.raises(CheckpointError, match="layer 0: no tensor is stored"):
            read_plan(tmp_path, CONFIG)
        return
    says = refusal(tmp_path, tensors, num_hidden_layers=layers)
    assert "layer 2: no tensor is stored" in says
    assert f"num_hidden_layers {layers}" in says


def test_a_checkpoint_may_be_a_draft_alone(tmp_path):
    assert E2 in read(tmp_path, experts(L2, 4)).experts
