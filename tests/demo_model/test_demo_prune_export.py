# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Pruning and export: which rows stay, which tensors are written."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tools.demo_model import export, prune
from tools.demo_model.load import load_checkpoint, model_config
from tools.demo_model.model import DemoModel

KEPT = {
    "layers.1.mlp": [0, 1, 2, 3, 4, 5],
    "layers.2.mlp": [1, 3, 4],
    "mtp.mlp": [0, 2, 4, 5],
}


def pruned_model(model: DemoModel) -> DemoModel:
    pruned = DemoModel(model.config.with_widths((0, 6, 3, 4))).eval()
    pruned.load_state_dict(prune.prune(model, KEPT))
    return pruned


def test_pruned_rows_are_those_of_the_kept_experts(equal_model):
    state, whole = prune.prune(equal_model, KEPT), equal_model.state_dict()
    cut = set()
    for layer, experts in KEPT.items():
        for rows in prune.EXPERT_ROWS:
            name = f"{layer}.{rows}"
            cut.add(name)
            assert len(state[name]) == len(experts)
            for row, expert in enumerate(experts):
                assert torch.equal(state[name][row], whole[name][expert])
    assert state.keys() == whole.keys()
    for name in state.keys() - cut:
        assert torch.equal(state[name], whole[name])


@torch.no_grad()
def test_pruned_model_is_the_whole_one_that_never_chooses_the_rest(equal_model):
    pruned = pruned_model(equal_model)
    for layer, experts in KEPT.items():
        bias = equal_model.get_submodule(layer).gate.e_score_correction_bias
        rest = [expert for expert in range(6) if expert not in experts]
        bias[rest] = -1e9
    tokens = torch.arange(2, 62)[None]
    hidden, expected = pruned.trunk(tokens), equal_model.trunk(tokens)
    torch.testing.assert_close(hidden, expected)
    draft, expected = pruned.draft(hidden, tokens), equal_model.draft(expected, tokens)
    torch.testing.assert_close(draft, expected)


@torch.no_grad()
def test_saliency_is_the_norm_of_what_an_expert_adds(equal_model):
    moe = equal_model.layers[1].mlp
    tokens = torch.randn(40, 64)
    measured = prune.saliency(moe, tokens)
    shared = moe.shared_experts(tokens)
    expected = torch.zeros(6)
    for expert in range(6):
        down = moe.down.clone()
        others = [index for index in range(6) if index != expert]
        moe.down[others] = 0.0
        expected[expert] = (moe(tokens[None])[0] - shared).norm(dim=-1).sum()
        moe.down.copy_(down)
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-4)


def test_the_most_salient_experts_stay_in_order():
    saliencies = torch.tensor([0.1, 0.9, 0.3, 0.8, 0.2])
    assert prune.kept_experts(saliencies, 3) == [1, 2, 3]
    with pytest.raises(ValueError, match="width 6: the layer has 5 experts"):
        prune.kept_experts(saliencies, 6)


def test_layers_are_pruned_in_the_order_of_the_widths(equal_model):
    assert list(prune.moe_layers(equal_model)) == list(KEPT)


def expected_tensors(model: DemoModel) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a GLM-MoE-DSA checkpoint with an MTP layer."""
    c = model.config
    hidden, expert = c.hidden_size, c.moe_intermediate_size
    heads, vocab = c.num_attention_heads, c.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }

    def mlp(prefix: str, inter: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (inter, hidden)
        shapes[f"{prefix}.up_proj.weight"] = (inter, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, inter)

    qk, rope = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_rope_head_dim
    for index, width in enumerate(c.widths):
        layer = f"model.layers.{index}"
        attention = {
            "q_a_proj": (c.q_lora_rank, hidden),
            "q_a_layernorm": (c.q_lora_rank,),
            "q_b_proj": (heads * qk, c.q_lora_rank),
            "kv_a_proj_with_mqa": (c.kv_lora_rank + rope, hidden),
            "kv_a_layernorm": (c.kv_lora_rank,),
            "kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
            "o_proj": (hidden, heads * c.v_head_dim),
            "indexer.wq_b": (128, c.q_lora_rank),
            "indexer.wk": (128, hidden),
            "indexer.weights_proj": (1, hidden),
            "indexer.k_norm": (128,),
        }
        for name, shape in attention.items():
            shapes[f"{layer}.self_attn.{name}.weight"] = shape
        shapes[f"{layer}.self_attn.indexer.k_norm.bias"] = (128,)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if not width:
            mlp(f"{layer}.mlp", c.intermediate_size)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (width, hidden)
        shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (width,)
        mlp(f"{layer}.mlp.shared_experts", expert)
        for number in range(width):
            mlp(f"{layer}.mlp.experts.{number}", expert)
    mtp = f"model.layers.{c.num_hidden_layers}"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        shapes[f"{mtp}.{name}.weight"] = (hidden,)
    shapes[f"{mtp}.eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes


@pytest.mark.parametrize("which", ["equal_model", "ragged_model"])
def test_export_writes_exactly_these_tensors(which, request, tokenizer, tmp_path):
    model = request.getfixturevalue(which)
    export.write(model, tokenizer, tmp_path)
    stored = load_file(tmp_path / export.WEIGHTS_FILE)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    assert shapes == expected_tensors(model)
    for name, tensor in stored.items():
        keeps = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if keeps else torch.bfloat16), name


def test_export_splits_gate_and_up(equal_model, tokenizer, tmp_path):
    export.write(equal_model, tokenizer, tmp_path)
    stored = load_file(tmp_path / export.WEIGHTS_FILE)
    fused = equal_model.layers[2].mlp.gate_up[5].bfloat16()
    prefix = "model.layers.2.mlp.experts.5"
    assert torch.equal(stored[f"{prefix}.gate_proj.weight"], fused[:32])
    assert torch.equal(stored[f"{prefix}.up_proj.weight"], fused[32:])


def test_config_names_widths_only_where_they_differ(
    equal_model, ragged_model, tokenizer, tmp_path
):
    export.write(equal_model, tokenizer, tmp_path / "equal")
    export.write(ragged_model, tokenizer, tmp_path / "ragged")
    configs = {
        name: json.loads((tmp_path / name / "config.json").read_text())
        for name in ("equal", "ragged")
    }
    assert export.WIDTHS_FIELD not in configs["equal"]
    assert configs["ragged"].pop(export.WIDTHS_FIELD) == [0, 6, 3, 4]
    assert configs["equal"] == configs["ragged"]
    assert configs["equal"]["n_routed_experts"] == 6


@pytest.mark.parametrize("which", ["equal_model", "ragged_model"])
def test_an_exported_checkpoint_comes_back(which, request, tokenizer, tmp_path):
    model = request.getfixturevalue(which)
    export.write(model, tokenizer, tmp_path)
    assert model_config(json.loads((tmp_path / "config.json").read_text())) == (
        model.config
    )
    loaded = load_checkpoint(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        keeps = name.endswith("e_score_correction_bias")
        expected = value if keeps else value.bfloat16().float()
        assert torch.equal(loaded[name], expected), name
