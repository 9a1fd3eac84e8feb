# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A checkpoint is served as EXL3 if its tensors are, whatever its config says."""

import json
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeTextConfig

from exl3.checkpoint.plan import CheckpointPlan
from exl3.format.errors import CheckpointError, TensorError
from tests.checkpoints import write_checkpoint
from tests.exl3_layers import make_layer
from tests.exl3_stored import planned
from tests.packs import write_pack
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import (
    ReplicatedLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.exl3.config import Exl3Config
from vllm.model_executor.model_loader import base_loader, weight_utils
from vllm.model_executor.models.utils import WeightsMapper
from vllm.transformers_utils import exl3
from vllm.transformers_utils.config import get_config

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Checkpoints by what their config says of a quantization."""
    folder = tmp_path_factory.mktemp("packs")
    small = {"layers": 2, "experts": 4, "mtp": 1}
    return {
        name: write_pack(folder / name, stamp=stamp, ranks=2, **small).path
        for name, stamp in (("exl3", None), ("modelopt", MODELOPT), ("nothing", {}))
    }


def rewrite(path, out, **fields):
    """A copy under a config that differs; a field of None is removed."""
    shutil.copytree(path, out)
    config = json.loads((path / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (out / "config.json").write_text(json.dumps(config))
    return out


def read(path):
    return get_config(str(path), trust_remote_code=False)


@pytest.mark.parametrize("stamp", ["exl3", "modelopt", "nothing"])
def test_the_tensors_decide(packs, stamp):
    assert read(packs[stamp]).quantization_config["quant_method"] == "exl3"


def test_the_engine_needs_no_flag(packs):
    model = ModelConfig(str(packs["nothing"]), skip_tokenizer_init=True)
    assert model.quantization == "exl3"
    config = weight_utils.get_quant_config(model, LoadConfig())
    assert isinstance(config, Exl3Config)
    assert "model.layers.1.mlp.experts" in config.plan.experts
    assert config.source == (str(packs["nothing"]), None)


@pytest.mark.parametrize("place", ["outside", "inside", "nowhere"])
def test_a_multimodal_config_says_so_in_both_places(packs, place):
    text = Qwen3VLMoeTextConfig(num_hidden_layers=2)
    config = Qwen3VLMoeConfig(text_config=text.to_dict())
    stated = {"outside": config, "inside": config.text_config}.get(place)
    if stated is not None:
        stated.quantization_config = {**MODELOPT}
    exl3.resolve_config(config, packs["exl3"], None)
    for part in (config, config.text_config):
        assert part.quantization_config["quant_method"] == "exl3"
        assert "quant_algo" not in part.quantization_config


def test_another_method_that_the_user_names_is_refused(packs):
    with pytest.raises(ValueError, match=r"exl3.*does not match.*fp8"):
        ModelConfig(str(packs["exl3"]), quantization="fp8", skip_tokenizer_init=True)


def test_a_dense_checkpoint_is_left_alone(tmp_path):
    config = read(write_checkpoint(tmp_path / "dense", layers=2, experts=4))
    assert not hasattr(config, "quantization_config")


def test_a_checkpoint_that_only_says_so_is_refused(tmp_path):
    path = write_checkpoint(
        tmp_path / "dense", layers=2, quantization_config={"quant_method": "exl3"}
    )
    with pytest.raises(CheckpointError, match=r"none of its \d+ tensors"):
        read(path)


def test_exl3_asked_for_a_dense_checkpoint_is_refused(tmp_path):
    path = write_checkpoint(tmp_path / "dense", layers=2, experts=4)
    model = ModelConfig(str(path), quantization="exl3", skip_tokenizer_init=True)
    with pytest.raises(CheckpointError, match="holds no EXL3 tensors"):
        weight_utils.get_quant_config(model, LoadConfig())


def test_a_stored_head_is_not_tied(tmp_path):
    pack = write_pack(
        tmp_path / "pack",
        trunk={"head"},
        layers=2,
        experts=4,
        mtp=0,
        tie_word_embeddings=True,
    )
    assert read(pack.path).tie_word_embeddings is False


def test_what_was_compiled_for_one_checkpoint_is_not_taken_for_another(packs, tmp_path):
    path = rewrite(packs["exl3"], tmp_path / "pack")

    def compiled_for():
        model = ModelConfig(str(path), skip_tokenizer_init=True)
        return model.compute_hash()

    before = compiled_for()
    assert compiled_for() == before
    shard = next(path.glob("*.safetensors"))
    save_file(load_file(shard), shard, metadata={"changed": "yes"})
    assert compiled_for() != before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 2}, None),
        # Slices of 128 cannot be cut again.
        ({"tensor_parallel_size": 4}, r"2 slices of 128.* by 4 ranks.*\[1, 2\]"),
        # Data parallel ranks share the experts, but not the heads.
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 4},
            r"2 slices.* by 8 ranks",
        ),
        ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, None),
    ],
)
def test_ranks_that_the_experts_cannot_be_cut_for_are_refused(packs, options, says):
    from vllm.config import ParallelConfig

    model = ModelConfig(str(packs["exl3"]), skip_tokenizer_init=True)
    parallel = ParallelConfig(**options)
    if says is None:
        model.verify_with_parallel_config(parallel)
        return
    with pytest.raises(CheckpointError, match=says):
        model.verify_with_parallel_config(parallel)


def test_a_hubs_checkpoint_is_fetched_before_it_is_planned(
    packs, tmp_path, monkeypatch
):
    hub = tmp_path / "hub"
    hub.mkdir()
    fetched = []

    def download(model, cache_dir, patterns, revision, ignore_patterns):
        fetched.append((model, cache_dir, *patterns, revision))
        for file in packs["exl3"].glob(patterns[0]):
            shutil.copy(file, hub)
        return str(hub)

    monkeypatch.setattr(weight_utils, "download_weights_from_hf", download)
    config = SimpleNamespace(quantization_config={"quant_method": "exl3"})
    model = SimpleNamespace(
        model="org/pack",
        revision="main",
        quantization="exl3",
        quantization_config=None,
        hf_config=config,
    )
    load = SimpleNamespace(download_dir="/weights", ignore_patterns=[])
    made = weight_utils.get_quant_config(model, load)
    assert made.plan.is_exl3
    assert fetched == [
        ("org/pack", "/weights", "*.json", "main"),
        ("org/pack", "/weights", "*.safetensors", "main"),
    ]


def test_names_of_a_layers_modules(rng):
    names = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.self_attn.q_a_proj",
        "model.layers.2.shared_head.head",
        "model.language_model.layers.1.mlp.down_proj",
    ]
    matrix = planned(make_layer(rng, 128, 128, 64, 1))
    config = Exl3Config(CheckpointPlan(linears=dict.fromkeys(names, matrix)))
    config.apply_vllm_mapper(
        WeightsMapper(
            orig_to_new_prefix={"model.language_model.": "language_model.model."}
        )
    )
    assert config.stored_names("model.layers.0.self_attn.qkv_proj") == names[:3]
    assert config.stored_names("model.layers.2.head") == [names[4]]
    assert config.stored_names("language_model.model.layers.1.mlp.down_proj") == [
        names[5]
    ]
    assert config.stored_names("model.layers.0.self_attn.o_proj") == []
    with pytest.raises(
        TensorError, match=r"q_a_proj: EXL3, but the rest of .*fused_qkv_a_proj"
    ):
        config.stored_names("model.layers.0.self_attn.fused_qkv_a_proj")


def test_a_models_own_names_of_fused_modules_count(rng):
    matrix = planned(make_layer(rng, 128, 128, 64, 1))
    config = Exl3Config(CheckpointPlan(linears={"a.left": matrix, "a.right": matrix}))
    config.packed_modules_mapping = {"both": ["left", "right"]}
    assert config.stored_names("a.both") == ["a.left", "a.right"]


def test_a_dense_layer_keeps_upstreams_method(as_rank):
    layer = ReplicatedLinear(
        128, 128, bias=False, quant_config=Exl3Config(), prefix="m.o"
    )
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)


@pytest.mark.parametrize("target_is_exl3", [True, False])
@pytest.mark.parametrize("draft", ["same", "exl3", "dense"])
def test_a_draft_has_the_quantization_of_its_own_checkpoint(
    packs, tmp_path, target_is_exl3, draft
):
    dense = write_checkpoint(tmp_path / "dense", layers=2, experts=4)
    paths = {"exl3": packs["nothing"], "dense": dense}
    path = packs["exl3"] if target_is_exl3 else dense
    target = ModelConfig(str(path), skip_tokenizer_init=True)
    quant_config = None
    if target_is_exl3:
        quant_config = weight_utils.get_quant_config(target, LoadConfig())
    engine = SimpleNamespace(
        model_config=target, quant_config=quant_config, load_config=LoadConfig()
    )
    of_draft = ModelConfig(str(paths.get(draft, path)), skip_tokenizer_init=True)
    own = base_loader._with_own_quantization(engine, of_draft).quant_config
    if draft == "dense" or (draft == "same" and not target_is_exl3):
        assert own is None
        return
    assert own.source == (str(paths.get(draft, path)), None)
    # A model's own names must not reach the other model's config.
    assert own is not quant_config
    assert (own.plan is getattr(quant_config, "plan", None)) == (draft == "same")
