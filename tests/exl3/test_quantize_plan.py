# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What `exl3 quantize` makes of its arguments, before a weight is read."""

import json
from collections import Counter
from functools import cache

import pytest

from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.modules import group_by_module
from exl3.format.constants import Codebook
from exl3.format.errors import CheckpointError, FileError, TensorError
from exl3.tools.quantize.bits import expert_bits
from exl3.tools.quantize.plan import plan_parts
from exl3.tools.quantize.recipe import Recipe, read_bits_map
from exl3.tools.shared.errors import ToolError
from tests.checkpoints import make_config, make_tensors

WIDTHS = (0, 3, 2, 2)  # a dense layer, two with experts, and a draft layer
LAYERS = 3


@cache
def headers(model_type="glm_moe_dsa", widths=WIDTHS):
    layers = len(widths) - 1
    config = make_config(model_type, widths=list(widths), layers=layers)
    tensors = make_tensors(config, list(widths))
    return [
        TensorHeader(name, "BF16", tuple(tensor.shape), "model.safetensors")
        for name, tensor in tensors.items()
    ]


def plan(found=None, tied=False, **recipe):
    recipe = {"bits": 3} | recipe
    modules = group_by_module(headers() if found is None else found)
    return plan_parts(modules, LAYERS, Recipe.make(**recipe), tied=tied)


def encoded(parts):
    """Bits by module, for what is no routed expert."""
    return {linear.module: linear.bits for part in parts for linear in part.linears}


def test_every_tensor_has_one_place():
    parts = plan()
    names = [at.name for part in parts for at in part.kept]
    names += [linear.weight.name for part in parts for linear in part.linears]
    names += [
        at.name
        for part in parts
        if part.experts
        for expert in part.experts.weights
        for at in expert.values()
    ]
    assert Counter(names) == Counter(at.name for at in headers())
    assert [part.name for part in parts] == [
        *(f"layer-{layer}" for layer in range(4)),
        "rest",
    ]
    assert [part.experts.width if part.experts else 0 for part in parts[:4]] == [
        *WIDTHS
    ]
    total = sum(at.num_bytes for at in headers())
    assert sum(part.num_bytes for part in parts) == total


def test_what_is_small_or_chooses_stays_as_it_is():
    parts = plan(attn_bits=5)
    kept = {at.name for part in parts for at in part.kept}
    for part in ("norm", "mlp.gate.", "indexer", "eh_proj", "embed_tokens"):
        names = {at.name for at in headers() if part in at.name}
        assert names and names <= kept
    bits = encoded(parts)
    assert bits.pop("lm_head") == 6
    assert set(bits.values()) == {5}
    last = {module.rpartition(".")[2] for module in bits}
    assert last == {
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


@pytest.mark.parametrize(
    ("model_type", "wanted"),
    [("glm4_moe", {"q_proj", "k_proj", "v_proj"}), ("qwen3_moe", {"o_proj"})],
)
def test_other_families(model_type, wanted):
    found = headers(model_type, (0, 2, 2))
    parts = plan_parts(group_by_module(found), 2, Recipe.make(bits=3), tied=False)
    biased = [linear for part in parts for linear in part.linears if linear.bias]
    assert bool(biased) == (model_type == "glm4_moe")
    assert wanted <= {module.rpartition(".")[2] for module in encoded(parts)}


def test_beside_slices_all_is_dense_unless_asked_for():
    assert encoded(plan(ranks=2)) == {}
    bits = encoded(plan(ranks=2, attn_bits=5, head_bits=6))
    assert bits.pop("lm_head") == 6
    assert set(bits.values()) == {5}


def test_a_draft_of_16_bits_stays_as_it_is():
    parts = plan(mtp_bits=16)
    draft = parts[3]
    assert (draft.layer, draft.experts, draft.linears) == (3, None, [])
    assert encoded(parts)


def test_patterns_keep_modules():
    bits = encoded(plan(dense=("*.self_attn.*", "model.layers.1.mlp.experts.*")))
    assert not any("self_attn" in module for module in bits)
    parts = plan(dense=("model.layers.1.mlp.experts.*",))
    assert [bool(part.experts) for part in parts[:4]] == [False, False, True, True]


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"dense": ("model.layer.0.*",)}, "--dense model.layer.0.*: matches no module"),
        (
            {"dense": ("*.experts.1.*",)},
            r"\*.experts.1.\*: matches some experts of model.layers.1.mlp.experts and",
        ),
        (
            {"dense": ("*.q_a_proj",)},
            "model.layers.0.self_attn.q_a_proj as it is, and .*kv_a_proj_with_mqa is",
        ),
        ({"dense": ("*",)}, "nothing is left to encode"),
        (
            {"ranks": 2, "dense": ("model.layers.2.mlp.experts.*",)},
            r"layers in a row, .* encoded in \[1, 3\]",
        ),
        ({"ranks": 2, "dense": ("*.experts.*",)}, "none are to be encoded"),
        (
            {"ranks": 3},
            "--tp 3: .*0.gate_proj.weight has 256 intermediate and 256 hidden feature",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(recipe, says):
    with pytest.raises(ToolError, match=says) as refusal:
        plan(**recipe)
    assert "\n" not in str(refusal.value)


def test_stacked_experts_are_refused():
    stack = TensorHeader("model.layers.1.mlp.experts.down_proj", "BF16", (3, 8, 8), "a")
    with pytest.raises(CheckpointError, match=r"a: .*experts.down_proj holds all"):
        plan([*headers(), stack])


def test_an_expert_that_is_missing_is_named():
    found = [at for at in headers() if ".layers.2.mlp.experts.1.up_proj" not in at.name]
    with pytest.raises(TensorError, match=r"layers.2.mlp.experts.1: the up projection"):
        plan(found)


def test_a_weight_that_is_no_matrix_is_named():
    found = [
        at._replace(shape=(4, 4, 4))
        if at.name.endswith("1.self_attn.o_proj.weight")
        else at
        for at in headers()
    ]
    with pytest.raises(TensorError, match=r"layers.1.self_attn.o_proj.weight has sha"):
        plan(found)


def test_a_tied_head_is_encoded_from_the_embeddings():
    found = [at for at in headers() if at.name != "lm_head.weight"]
    head = plan(found, tied=True)[-1].linears[0]
    assert (head.module, head.bits) == ("lm_head", 6)
    assert head.weight.name == "model.embed_tokens.weight"
    assert "lm_head" not in encoded(plan(found, tied=True, head_bits=16))
    assert "lm_head" not in encoded(plan(found, tied=False))
    with pytest.raises(TensorError, match=r"model.embed_tokens.weight: is not stored"):
        plan([at for at in found if at.name != "model.embed_tokens.weight"], tied=True)


# --- Arguments ----------------------------------------------------------------------


def test_defaults():
    plain = Recipe.make(bits=3.25)
    assert plain == Recipe(3.25, 4, 6, 3, Codebook.MUL1)
    assert plain.is_mixed
    sliced = Recipe.make(bits=3, ranks=4)
    assert sliced == Recipe(3, 16, 16, 3, Codebook.MCG, ranks=4)
    assert not sliced.is_mixed
    mapped = Recipe.make(bits=None, bits_map={1: (3, 5), 2: (2, 3)})
    assert (mapped.bits, mapped.attn_bits, mapped.mtp_bits) == (3.25, 4, 2)
    assert not mapped.is_mixed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"bits": None}, "--bits, --bits-map: give one"),
        ({"bits": 3, "bits_map": {1: (3,)}}, "--bits, --bits-map: give one"),
        ({"bits": 9}, "--bits 9: expected 1 to 8"),
        ({"bits": float("nan")}, "--bits nan: expected"),
        ({"bits": 3, "ranks": 2, "codebook": Codebook.MUL1}, "always mcg"),
        ({"bits": 3, "attn_bits": 3.25}, "--attn-bits: 3.25 bits do not exist"),
        ({"bits": 3, "head_bits": 9}, "--head-bits: 9 bits"),
        ({"bits": 3, "attn_bits": 2.5, "codebook": Codebook.MCG}, "2.5 bits do not"),
        ({"bits": 3, "mtp_bits": 2.5, "ranks": 2}, "--mtp-bits: 2.5 bits do not"),
        ({"bits": None, "bits_map": {1: (2.5,)}, "ranks": 2}, "--bits-map: 2.5 bits"),
    ],
)
def test_arguments_that_are_refused(arguments, says):
    with pytest.raises(ToolError, match=says):
        Recipe.make(**arguments)


def test_half_rates_exist_with_mul1():
    recipe = Recipe.make(bits=None, bits_map={1: (2.5, 3.5)}, attn_bits=1.5)
    assert recipe.codebook is Codebook.MUL1


# --- The bits of experts ------------------------------------------------------------


def bits_of(**recipe):
    sensitivities = recipe.pop("sensitivities", None)
    recipe = Recipe.make(**{"bits": 3, **recipe})
    parts = plan_parts(group_by_module(headers()), LAYERS, recipe, tied=False)
    return expert_bits(parts, LAYERS, recipe, sensitivities)


SENSITIVITIES = {0: [], 1: [5.0, 1.0, 40.0], 2: [0.1, 7.0], 3: [100.0, 100.0]}


def test_bits_are_one_number_or_a_map():
    assert bits_of() == {1: [3] * 3, 2: [3] * 2, 3: [3] * 2}
    assert bits_of(mtp_bits=5)[3] == [5, 5]
    bits_map = {1: (3, 4, 3), 2: (2, 2.0)}
    found = bits_of(bits=None, bits_map=bits_map)
    assert found == {1: [3, 4, 3], 2: [2, 2], 3: [2, 2]}
    assert all(type(bits) is int for row in found.values() for bits in row)
    assert bits_of(bits=None, bits_map={**bits_map, 3: (5, 6)})[3] == [5, 6]


@pytest.mark.parametrize("mean", [3.2, 3.4, 3.605, 2.2])
def test_the_mean_is_met_and_goes_to_who_gains_most(mean):
    found = bits_of(bits=mean, sensitivities=SENSITIVITIES)
    trunk = found[1] + found[2]
    assert abs(sum(trunk) / len(trunk) - mean) <= 0.01
    order = sorted(zip(SENSITIVITIES[1] + SENSITIVITIES[2], trunk))
    assert [bits for _, bits in order] == sorted(trunk)
    assert found[3] == [int(mean)] * 2  # drafts are left out of the mean


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"bits": 3.3, "sensitivities": SENSITIVITIES}, "come to 3.2 or 3.4 on"),
        ({"bits": 3.2}, "--text tells"),
        ({"bits": 3.2, "dense": ("*.experts.*",)}, "none are to be encoded"),
        ({"bits": None, "bits_map": {1: (3,) * 3}}, "--bits-map: has no layer 2"),
        (
            {"bits": None, "bits_map": {1: (3,) * 3, 2: (3,)}},
            "layer 2 has 1 bits, and 2 routed experts",
        ),
        (
            {"bits": None, "bits_map": {0: (3,), 1: (3,) * 3, 2: (3, 3)}},
            "layer 0 has 1 bits, and 0 routed experts",
        ),
        (
            {
                "bits": None,
                "bits_map": {1: (3,) * 3, 2: (3, 3), 3: (3, 3)},
                "mtp_bits": 16,
            },
            "--mtp-bits 16 leaves it",
        ),
    ],
)
def test_bits_that_do_not_fit_are_refused(recipe, says):
    with pytest.raises(ToolError, match=says):
        bits_of(**recipe)


def test_a_map_is_read_as_the_format_spells_it(tmp_path):
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"1": {"k": [3, 4], "routed": [5, 6]}}))
    assert read_bits_map(str(file)) == {1: (3, 4)}
    assert read_bits_map(f"{file}:routed") == {1: (5, 6)}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "expected an object by layer"),
        ("{}", "expected an object by layer"),
        ("{", "is not JSON"),
        ('{"1": [3]}', "layer '1' has"),
        ('{"01": {"k": [3]}}', "layer '01' has"),
        ('{"x": {"k": [3]}}', "layer 'x' has"),
        ('{"1": {"k": []}}', "expected an object with a list 'k'"),
        ('{"1": {"k": ["3"]}}', "gives expert 0 '3' bits"),
        ('{"1": {"k": [3, true]}}', "gives expert 1 True bits"),
        ('{"1": {"k": [NaN]}}', "gives expert 0 nan bits"),
        ('{"1": {"k": [9]}}', "gives expert 0 9 bits"),
        ('{"%s": {"k": [3]}}' % ("9" * 5000), "expected an object with a list"),
    ],
)
def test_a_map_that_is_none_is_refused(tmp_path, content, says):
    file = tmp_path / "map.json"
    file.write_text(content)
    with pytest.raises((ToolError, FileError), match=says) as refusal:
        read_bits_map(str(file))
    assert file.name in str(refusal.value)
    assert len(str(refusal.value)) < 400 and "\n" not in str(refusal.value)


def test_a_map_that_is_missing_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"nowhere.json"):
        read_bits_map(str(tmp_path / "nowhere.json"))
