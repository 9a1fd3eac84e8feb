# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Sparse attention models on the CPU: dense while the context fits, else refused."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from tests.checkpoints import write_checkpoint
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.dense_dsa import attend_densely, drop_unbuilt_indexers
from vllm.platforms.cpu import _choose_mla_backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

DSA_TYPES = ["glm_moe_dsa", "deepseek_v32"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Returns a function from a model type to the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: write_checkpoint(folder / kind, model_type=kind)


def engine_config(path, **arguments):
    return EngineArgs(
        model=str(path), enforce_eager=True, **{"max_model_len": 256, **arguments}
    ).create_engine_config()


@pytest.mark.parametrize("kind", DSA_TYPES)
def test_target_and_draft_are_built_without_an_indexer(checkpoint, kind):
    stored = AutoConfig.from_pretrained(checkpoint(kind))
    config = engine_config(
        checkpoint(kind),
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )

    target = config.model_config
    draft = config.speculative_config.draft_model_config
    for model_config in target, draft:
        hf_config = model_config.hf_config
        assert not [name for name in dir(hf_config) if name.startswith("index")]
        assert model_config.hf_text_config is hf_config
        assert model_config.use_mla
        for field in "n_routed_experts", "kv_lora_rank", "rms_norm_eps", "n_group":
            assert getattr(hf_config, field) == getattr(stored, field)
    # The router of GLM-MoE-DSA computes in float32 by this name.
    assert target.hf_config.model_type == kind
    assert target.architecture == stored.architectures[0]
    assert draft.hf_config.model_type == "deepseek_mtp"
    assert draft.architecture == "DeepseekV32MTPModel"


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_the_dense_config_survives_the_way_to_a_worker(checkpoint, clone):
    config = engine_config(checkpoint("glm_moe_dsa"))
    cloned = clone(config.model_config.hf_config)
    assert not hasattr(cloned, "index_topk")
    assert cloned.model_type == "glm_moe_dsa"


@pytest.mark.parametrize("kind", DSA_TYPES)
@pytest.mark.parametrize("arguments", [{"max_model_len": 513}, {"max_model_len": None}])
def test_a_longer_context_is_refused(checkpoint, kind, arguments):
    length = arguments["max_model_len"] or 2048
    with pytest.raises(
        ValueError,
        match=rf"on the CPU: max_model_len {length} is longer than index_topk 512\..*"
        r"Set --max-model-len 512 or less\.",
    ):
        engine_config(checkpoint(kind), **arguments)


@pytest.mark.parametrize(("asked", "served"), [(512, 512), (100, 100), (-1, 512)])
def test_a_context_that_fits_is_served(checkpoint, asked, served):
    config = engine_config(
        checkpoint("glm_moe_dsa"),
        max_model_len=asked,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    assert config.model_config.max_model_len == served
    assert config.speculative_config.draft_model_config.max_model_len == served


def test_a_model_without_sparse_attention_is_left_alone(checkpoint):
    path = checkpoint("deepseek_v3")
    config = engine_config(path, max_model_len=None)
    assert config.model_config.max_model_len == 2048
    assert vars(config.model_config.hf_config).keys() >= {"kv_lora_rank", "n_group"}


def test_another_sparse_architecture_is_left_alone():
    hf_config = SimpleNamespace(index_topk=512, architectures=["DeepseekV4ForCausalLM"])
    model_config = SimpleNamespace(
        hf_config=hf_config,
        architectures=hf_config.architectures,
        max_model_len=4096,
        original_max_model_len=4096,
    )
    attend_densely(model_config, "CPU")
    assert model_config.hf_config is hf_config
    assert hf_config.index_topk == 512


@pytest.mark.parametrize("indexer_is_built", [True, False])
def test_indexer_tensors_go_with_the_indexer(indexer_is_built):
    attention = torch.nn.Module()
    attention.o_proj = torch.nn.Linear(1, 1)
    if indexer_is_built:
        attention.indexer = torch.nn.Linear(1, 1)
    model = torch.nn.Module()
    model.self_attn = attention
    names = [
        "model.layers.3.self_attn.o_proj.weight",
        "model.layers.3.self_attn.indexer.wk.weight",
        "model.layers.3.self_attn.indexer.k_norm.bias",
    ]
    weights = [(name, torch.zeros(1)) for name in names]
    kept = [name for name, _ in drop_unbuilt_indexers(model, weights)]
    assert kept == (names if indexer_is_built else names[:1])


@pytest.mark.parametrize(
    ("dtype", "asked", "chosen"),
    [
        ("float32", None, AttentionBackendEnum.CPU_MLA),
        ("float16", None, AttentionBackendEnum.CPU_MLA),
        ("float32", "CPU_MLA", AttentionBackendEnum.CPU_MLA),
        ("bfloat16", None, None),
        ("bfloat16", "AMX_MLA", AttentionBackendEnum.AMX_MLA),
    ],
)
def test_mla_backend_has_the_dtype(checkpoint, dtype, asked, chosen):
    config = engine_config(
        checkpoint("deepseek_v3"), dtype=dtype, attention_config={"backend": asked}
    )
    assert config.attention_config.backend == chosen
    if chosen == AttentionBackendEnum.CPU_MLA:
        # What the reference kernel needs.
        assert config.cache_config.block_size == 16


def test_amx_by_name_is_refused_for_a_dtype_it_has_not(checkpoint):
    with pytest.raises(ValueError, match=r"AMX_MLA computes in bfloat16.*float32"):
        engine_config(
            checkpoint("deepseek_v3"),
            dtype="float32",
            attention_config={"backend": "AMX_MLA"},
        )


def test_a_model_without_mla_keeps_its_backend():
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=False, dtype=torch.float32),
        attention_config=SimpleNamespace(backend=None),
    )
    _choose_mla_backend(config)
    assert config.attention_config.backend is None
