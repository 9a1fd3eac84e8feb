# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A checkpoint run layer by layer equals the whole model of transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from exl3.format.errors import CheckpointError, TensorError, UnsupportedFormatError
from exl3.model import RoutedExperts, StreamedLayer, StreamedModel
from exl3.model.skeleton import FAMILIES
from tests.checkpoints import (
    make_config,
    make_tensors,
    save_checkpoint,
    write_checkpoint,
)
from tests.packs import KINDS, LINEARS, Format, write_pack
from tests.serving.oracle import widen
from tools.demo_model.load import load_checkpoint

ROOT = Path(__file__).parents[2]
TOKENS = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(1))
SMALL = {"layers": 3, "experts": 4, "mtp": 0, "dtype": "float32"}
#: Both sides compute in float32; they differ in the order of sums.
SAME = 1e-5
#: A twin was decoded in float64, a pack is in float32.
DECODED = 1e-4
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}


def run(folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """The logits of a checkpoint that is run layer by layer."""
    model = StreamedModel.open(folder)
    hidden = model.embed(tokens)
    for layer in model.layers():
        hidden = layer(hidden)
    return model.head(hidden)


@torch.no_grad()
def run_whole(folder: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """The logits of the whole model of transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()(tokens).logits


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to the size of what is wanted."""
    assert found.shape == wanted.shape and found.dtype == torch.float32
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_whole_model(tmp_path, family):
    folder = write_checkpoint(tmp_path, model_type=family, shards=2, **SMALL)
    assert difference(run(folder), run_whole(folder)) < SAME


@pytest.mark.parametrize(
    ("family", "fields", "edits"),
    [
        ("deepseek_v3", {"rope_scaling": YARN}, {}),
        ("deepseek_v3", {"n_group": 2, "topk_group": 1}, {}),
        ("deepseek_v2", {"n_group": 2, "topk_method": "group_limited_greedy"}, {}),
        ("deepseek_v2", {"q_lora_rank": None}, {"q_lora_rank": None}),
        ("deepseek_v3", {"dtype": "bfloat16"}, {}),
        ("glm_moe_dsa", {"index_topk": 16}, {}),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}, {}),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2, "mlp_only_layers": [0, 2]},
            {"mlp_only_layers": []},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_follows_the_config(tmp_path, family, fields, edits):
    folder = write_checkpoint(tmp_path, model_type=family, **{**SMALL, **fields})
    edit(folder, **edits)  # what tests.checkpoints has no word for
    assert difference(run(folder), run_whole(folder)) < SAME


def test_ties_the_head_to_the_embeddings(tmp_path):
    config = make_config("glm4_moe", tie_word_embeddings=True, **SMALL)
    tensors = make_tensors(config, [4] * 3, mtp=0, dtype="float32")
    del tensors["lm_head.weight"]
    folder = save_checkpoint(tmp_path, config, tensors)
    assert difference(run(folder), run_whole(folder)) < SAME


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa", "glm4_moe"])
def test_unequal_widths(tmp_path, family):
    folder = write_checkpoint(
        tmp_path / "unequal", model_type=family, widths=[0, 3, 6], layers=3, mtp=0
    )
    equal = widen(folder, tmp_path / "equal")
    assert StreamedModel.open(folder).widths == {1: 3, 2: 6}
    assert difference(run(folder), run_whole(equal)) < SAME


PACKS = {
    "all kinds": {"trunk": KINDS, "model_type": "glm_moe_dsa"},
    "codebooks": {"formats": [Format(2, "3inst"), Format(3), Format(2.5, "mul1")]},
    "biases": {"model_type": "glm4_moe"},
    "packed signs": {"legacy_signs": True},
    "slices": {"ranks": 2},
    "shared vectors": {"ranks": 2, "shared_h": True},
}


@pytest.mark.parametrize("name", PACKS)
def test_a_pack_equals_its_twin(tmp_path, name):
    size = {"layers": 2, "experts": 2, "mtp": 0, "dtype": "float32"}
    pack = write_pack(tmp_path / "pack", **size, **PACKS[name])
    assert StreamedModel.open(pack.path).plan.is_exl3
    assert difference(run(pack.path), run_whole(pack.twin)) < DECODED


@pytest.mark.parametrize("pack", ["demo-glm-dsa", "demo-glm-dsa-ragged-exl3"])
def test_the_demo_models_draft(pack):
    folder = ROOT / "examples" / pack
    reference = load_checkpoint(folder)
    with torch.no_grad():
        trunk = reference.trunk(TOKENS)
        wanted = reference.logits(reference.draft(trunk[:, :-1], TOKENS[:, 1:]))
    model = StreamedModel.open(folder)
    hidden = model.embed(TOKENS)
    for layer in model.layers():
        hidden = layer(hidden)
    assert model.draft_layers == [model.num_layers]
    draft = model.draft_layer(model.num_layers)
    found = draft.head(draft(hidden[:, :-1], TOKENS[:, 1:]))
    assert difference(model.head(hidden), reference.logits(trunk)) < SAME
    assert difference(found, wanted) < SAME
    assert len(draft.moe) == model.widths[model.num_layers]


def test_a_draft_reads_what_the_draft_before_it_gave(tmp_path):
    """Here the second draft has the first one's weights."""
    config = make_config("deepseek_v3", layers=1, experts=2, mtp=2, dtype="float32")
    tensors = make_tensors(config, [0, 2, 2], mtp=2, dtype="float32")
    for name in list(tensors):
        if ".layers.1." in name:
            tensors[name.replace(".layers.1.", ".layers.2.")] = tensors[name].clone()
    tensors["model.norm.weight"] = torch.ones(256)
    scale = torch.linspace(0.5, 2, 256)
    tensors["model.layers.1.shared_head.norm.weight"] = scale
    model = StreamedModel.open(save_checkpoint(tmp_path, config, tensors))
    first, second = (model.draft_layer(index) for index in model.draft_layers)
    hidden = torch.randn(2, 40, 256, generator=torch.Generator().manual_seed(2))
    normed = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    # hnorm takes back any scale of a whole state, so the two see the same state.
    torch.testing.assert_close(
        second(hidden, TOKENS), first(normed * scale, TOKENS), rtol=1e-4, atol=1e-4
    )
    assert difference(second(hidden, TOKENS), first(hidden, TOKENS)) > 0.1


def test_an_observer_sees_every_choice_and_what_it_adds(tmp_path):
    folder = write_checkpoint(tmp_path, model_type="deepseek_v3", **SMALL)
    model = StreamedModel.open(folder)
    hidden = model.embed(TOKENS)
    for layer in model.layers():
        if layer.moe is not None:
            check_observer(layer.moe, layer, hidden)
        hidden = layer(hidden)


def check_observer(moe: RoutedExperts, layer: StreamedLayer, hidden: torch.Tensor):
    """Sums up what an observer is told, and compares it with the experts' output."""
    seen = torch.zeros(TOKENS.numel(), dtype=torch.int64)
    total = torch.zeros(TOKENS.numel(), 256)
    outputs = []

    def observe(expert, tokens, x, weight, inner, out):
        seen[tokens] += 1
        gate, up = x @ moe.gate_proj[expert].T, x @ moe.up_proj[expert].T
        torch.testing.assert_close(inner, torch.nn.functional.silu(gate) * up)
        torch.testing.assert_close(out, inner @ moe.down_proj[expert].T)
        total.index_add_(0, tokens, out * weight[:, None])

    moe.observer = observe
    handle = moe.register_forward_hook(lambda *call: outputs.append(call[2]))
    layer(hidden)
    handle.remove()
    moe.observer = None
    assert (seen == 2).all()  # num_experts_per_tok
    torch.testing.assert_close(total, outputs[0])


def test_a_layer_names_its_modules_and_is_freed(tmp_path):
    folder = write_checkpoint(tmp_path, model_type="glm4_moe", **SMALL)
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    before = None
    for layer in StreamedModel.open(folder).layers():
        assert layer.linears
        for name, linear in layer.linears.items():
            assert torch.equal(linear.weight, stored[f"{name}.weight"])
        if layer.moe is not None:
            weight, bias = layer.gate
            prefix = f"model.layers.{layer.index}.mlp.gate"
            assert torch.equal(weight, stored[f"{prefix}.weight"])
            assert torch.equal(bias, stored[f"{prefix}.e_score_correction_bias"])
        if before is not None:
            assert all(weight.is_meta for weight in before.module.parameters())
        before = layer
    assert before.index == 2
    rest = StreamedModel.open(folder).layers(first=1)
    assert [layer.index for layer in rest] == [1, 2]


def edit(folder: Path, **fields: object) -> None:
    """Changes fields of a `config.json`."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_refuses_an_unknown_family(tmp_path):
    folder = write_checkpoint(tmp_path, **SMALL)
    edit(folder, model_type="llama")
    with pytest.raises(UnsupportedFormatError, match="model_type is 'llama'; this"):
        StreamedModel.open(folder)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v2", "norm_topk_prob", True),
    ],
)
def test_refuses_what_transformers_would_ignore(tmp_path, family, field, value):
    folder = write_checkpoint(tmp_path, model_type=family, **SMALL)
    edit(folder, **{field: value})
    with pytest.raises(UnsupportedFormatError, match=f"{field} is {value!r}; this"):
        StreamedModel.open(folder)


def test_refuses_a_config_that_transformers_refuses(tmp_path):
    folder = write_checkpoint(tmp_path, **SMALL)
    edit(folder, hidden_size="wide")
    with pytest.raises(CheckpointError, match=r"config.json: .*hidden_size") as refusal:
        StreamedModel.open(folder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("model.norm.weight", None, "norm.weight: is not stored in .*fetch"),
        ("lm_head.weight", torch.zeros(512, 128), r"lm_head.weight: .*\[512, 256\]"),
        (
            "model.layers.1.mlp.experts.3.up_proj.weight",
            torch.zeros(256, 256, dtype=torch.float8_e4m3fn),
            "experts.3.up_proj.weight: is stored as torch.float8_e4m3fn.*convert",
        ),
    ],
    ids=["missing", "misshaped", "quantized in another way"],
)
def test_refuses_a_tensor(tmp_path, name, replacement, message):
    config = make_config("deepseek_v3", **SMALL)
    tensors = make_tensors(config, [4] * 3, mtp=0, dtype="float32")
    del tensors[name]
    if replacement is not None:
        tensors[name] = replacement
    folder = save_checkpoint(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        run(folder)


def test_refuses_a_trellis_that_is_too_small(tmp_path):
    pack = write_pack(tmp_path / "pack", layers=1, experts=2, mtp=0, trunk=LINEARS)
    edit(pack.path, intermediate_size=640)
    with pytest.raises(TensorError, match=r"mlp\.gate_proj: is stored with"):
        run(pack.path)


def test_refuses_a_token_without_a_row(tmp_path):
    folder = write_checkpoint(tmp_path, **SMALL)
    with pytest.raises(TensorError, match=r"has 512 rows, .* gives token 600"):
        run(folder, torch.tensor([[5, 600]]))


def test_refuses_windows_that_need_a_choice_of_tokens(tmp_path):
    fields = {"indexer_types": ["full", "shared", "full"], "index_topk": 16}
    folder = write_checkpoint(tmp_path, model_type="glm_moe_dsa", **SMALL, **fields)
    with pytest.raises(CheckpointError, match=r"index_topk is 16.* windows of 40"):
        run(folder)
