# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A config that is read gets the widths that its checkpoint holds."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    GlmMoeDsaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from exl3.checkpoint import headers, plan
from exl3.format.errors import CheckpointError
from tests.checkpoints import write_checkpoint
from vllm.model_executor.models import expert_widths as hook
from vllm.transformers_utils import checkpoint
from vllm.transformers_utils import expert_widths as reading
from vllm.transformers_utils.config import get_config

WIDTHS = [0, 4, 6, 8]  # a dense layer, two of the decoder, the draft's


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    path = tmp_path_factory.mktemp("unequal")
    write_checkpoint(path, widths=WIDTHS)
    return path


def edit(path, copy, **fields):
    """A copy of a checkpoint with other fields in its config."""
    copy.mkdir(exist_ok=True)
    for file in path.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    config = {k: v for k, v in {**config, **fields}.items() if v is not None}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_reading_a_config_resolves_the_widths(unequal):
    config = get_config(str(unequal), trust_remote_code=False)
    assert config.resolved_expert_widths == WIDTHS
    assert config.n_routed_experts == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"n_routed_experts": WIDTHS[:3]},
        {"n_routed_experts": WIDTHS},
        {
            "per_layer_config": {
                "1": {"n_routed_experts": 4},
                "2": {"n_routed_experts": 6},
            }
        },
    ],
    ids=["list in the scalar", "list with draft", "transformers' per-layer field"],
)
def test_spellings_that_transformers_refuses(unequal, tmp_path, fields):
    path = edit(unequal, tmp_path, n_routed_experts_per_layer=None, **fields)
    config = get_config(str(path), trust_remote_code=False)
    assert config.resolved_expert_widths == WIDTHS
    assert config.n_routed_experts == 8
    assert not config.is_heterogeneous


def test_a_field_that_varies_for_another_reason_stays(unequal, tmp_path):
    per_layer = {"1": {"n_routed_experts": 4, "rms_norm_eps": 1.0}}
    fields = reading.move_widths_to_list({"per_layer_config": per_layer})
    assert fields == {
        "n_routed_experts_per_layer": {"1": 4},
        "per_layer_config": {"1": {"rms_norm_eps": 1.0}},
    }


def test_headers_are_read_once_while_the_files_stay(unequal, tmp_path, monkeypatch):
    path = edit(unequal, tmp_path)
    reads = []

    def read_checkpoint(folder, config):
        reads.append(folder)
        return plan.read_checkpoint(folder, config)

    monkeypatch.setattr(checkpoint, "read_checkpoint", read_checkpoint)
    for _ in range(2):
        config = get_config(str(path), trust_remote_code=False)
        assert config.resolved_expert_widths == WIDTHS
    assert reads == [path]
    index = path / headers.INDEX_FILE
    text = index.read_text()
    index.unlink()  # a link into the other checkpoint
    index.write_text(text + " ")
    get_config(str(path), trust_remote_code=False)
    assert reads == [path, path]


def test_a_contradiction_is_refused_as_the_config_is_read(unequal, tmp_path):
    path = edit(unequal, tmp_path, n_routed_experts_per_layer=[0, 4, 5, 8])
    with pytest.raises(CheckpointError, match=r"layer 2 a width of 5.*has 6 rows"):
        get_config(str(path), trust_remote_code=False)


def test_the_drafts_config_gets_its_width(unequal):
    from vllm.config import SpeculativeConfig

    config = get_config(
        str(unequal),
        trust_remote_code=False,
        hf_overrides_fn=SpeculativeConfig.hf_config_override,
    )
    assert config.architectures == ["DeepSeekMTPModel"]
    assert hook.layer_width("model.layers.3.mlp", config) == 8


@pytest.mark.parametrize("architectures", [["MixtralForCausalLM"], None])
def test_other_architectures_are_left_alone(architectures, tmp_path):
    """The same fields would be refused of an architecture that is supported."""
    fields = {"num_experts": 8, "num_experts_per_layer": [1, "x"]}
    config = PreTrainedConfig(architectures=architectures, **fields)
    before = config.to_dict()
    reading.resolve_config(config, tmp_path, None)
    assert config.to_dict() == before
    config.architectures = ["Qwen3MoeForCausalLM"]
    with pytest.raises(CheckpointError):
        reading.resolve_config(config, tmp_path, None)


@pytest.mark.parametrize("field", ["GlmMoeDsaForCausalLM", 1, [["x"]], {"a": 1}, True])
def test_what_is_no_list_of_names_is_left_to_upstream(field):
    assert not reading.is_supported(field)


def test_a_second_scalar_field_does_not_mislead(tmp_path):
    """A pruner may write DeepSeek's field into a config of Qwen, which has its own."""
    text = Qwen3MoeConfig(num_hidden_layers=2, num_experts=128, num_experts_per_tok=2)
    text.architectures = ["Qwen3MoeForCausalLM"]
    text.n_routed_experts = 8
    text.n_routed_experts_per_layer = [8, 4]
    reading.resolve_config(text, tmp_path, None)
    assert text.num_experts == 8
    assert hook.layer_config(text, "model.layers.1.mlp").num_experts == 4


def test_a_key_that_is_no_layer_is_refused(tmp_path):
    fields = {"per_layer_config": {"one": {"num_experts": 4}}}
    config = Qwen3MoeConfig(num_hidden_layers=2, num_experts=8)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.update(reading.move_widths_to_list(fields))
    with pytest.raises(CheckpointError, match="'one', which is no layer index"):
        reading.resolve_config(config, tmp_path, None)


def test_a_null_list_gives_way_to_the_list_in_the_scalar():
    fields = {"n_routed_experts": [4, 6], "n_routed_experts_per_layer": None}
    moved = reading.move_widths_to_list(fields)
    assert moved == {"n_routed_experts": 6, "n_routed_experts_per_layer": [4, 6]}


def test_a_checkpoint_elsewhere_is_taken_at_its_word():
    """Neither a folder nor in the hub's cache: the config alone decides."""
    config = GlmMoeDsaConfig(num_hidden_layers=4, num_experts_per_tok=2)
    config.architectures = ["GlmMoeDsaForCausalLM"]
    config.n_routed_experts_per_layer = [0, 0, 0, 4]
    reading.resolve_config(config, "someone/not-here", None)
    assert config.resolved_expert_widths == [0, 0, 0, 4]
    assert config.n_routed_experts == 4


@pytest.mark.parametrize("fetched", ["a shard", "the index", "both shards"])
def test_a_checkpoint_that_is_half_fetched_is_no_damaged_one(
    fetched, tmp_path, monkeypatch
):
    """An interrupted download must go on at the next start."""
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    gate = torch.zeros(4, 8)
    for layer, shard in enumerate(shards):
        save_file({f"model.layers.{layer}.mlp.gate.weight": gate}, tmp_path / shard)
    if fetched != "both shards":
        (tmp_path / shards[1]).unlink()
    if fetched == "the index":
        index = {"weight_map": dict(zip("ab", shards, strict=True))}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda *_, **__: str(tmp_path / "config.json"),
    )
    config = Qwen3MoeConfig(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2)
    config.architectures = ["Qwen3MoeForCausalLM"]
    if fetched == "both shards":
        with pytest.raises(CheckpointError, match=r"layer 0 a width of 8.*has 4 rows"):
            reading.resolve_config(config, "someone/fetching", None)
    else:
        reading.resolve_config(config, "someone/fetching", None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace('"qwen3_moe"', '"\xe9"'), "is not JSON"),
        (lambda text: text[:-9], "is not JSON"),
        (
            lambda text: text.replace(": 256,", ': "256",', 1),
            "'hidden_size' expected int",
        ),
        (
            lambda text: text.replace("{", '{"quantization_config": [1],', 1),
            "quantization_config is [1]; expected an object",
        ),
        (
            lambda text: text.replace('"num_experts": 4', '"num_experts": 4.0'),
            "num_experts is 4.0; expected a count",
        ),
    ],
)
def test_a_damaged_config_is_refused_in_one_line(tmp_path, change, says):
    """Upstream and transformers read it first, and say so in many, or in none."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    text = json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    assert get_config(tmp_path, trust_remote_code=False).num_experts == 4
    (tmp_path / "config.json").write_bytes(change(text).encode("latin-1"))
    with pytest.raises(CheckpointError) as refusal:
        get_config(tmp_path, trust_remote_code=False)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
