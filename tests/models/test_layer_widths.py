# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The hook that builds every layer from its own width, without an engine."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Qwen3MoeConfig,
)

from vllm.model_executor.models import expert_widths as hook
from vllm.transformers_utils import expert_widths as reading

WIDTHS = [0, 4, 6, 8]  # a dense layer, two of the decoder, the draft's


def config_with(widths=WIDTHS, **fields):
    config = DeepseekV3Config(
        num_hidden_layers=3, n_routed_experts=8, n_shared_experts=2, **fields
    )
    if widths is not None:
        config.resolved_expert_widths = widths
    return config


@pytest.mark.parametrize(
    ("prefix", "layer"),
    [
        ("model.layers.3.mlp", 3),
        ("layers.3", 3),
        ("model.layers.3", 3),
        ("language_model.model.layers.12.mlp.experts", 12),
        ("mtp.layers.0.mlp", 3),
        ("model.mtp.layers.1.mlp", 4),
    ],
)
def test_layer_index(prefix, layer):
    assert hook.layer_index(prefix, config_with()) == layer


@pytest.mark.parametrize(
    "prefix", ["", "model.mlp", "model.sublayers.3.mlp", "sublayers.3", "layers.3x.mlp"]
)
def test_a_prefix_without_a_layer_is_named(prefix):
    with pytest.raises(ValueError, match=f"prefix {prefix!r} names no layer"):
        hook.layer_width(prefix, config_with())


def test_an_index_past_the_list_names_index_and_length():
    with pytest.raises(ValueError, match=r"4 layers.*'model.layers.4.mlp'.*layer 4"):
        hook.layer_width("model.layers.4.mlp", config_with())


def test_without_the_list_the_config_itself_is_used():
    config = config_with(widths=None)
    assert hook.layer_config(config, "no layer here") is config
    engine = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config))
    assert hook.layer_vllm_config(engine, "no layer here") is engine


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_layer_sees_its_own_width(layer):
    config = config_with()
    view = hook.layer_config(config, f"model.layers.{layer}.mlp")
    assert view.n_routed_experts == WIDTHS[layer]
    assert config.n_routed_experts == 8
    assert view.hidden_size == config.hidden_size


def test_a_layer_of_qwen_sees_its_own_width():
    text = Qwen3MoeConfig(num_hidden_layers=4, num_experts=8)
    text.resolved_expert_widths = [8, 4, 6, 8]
    engine = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, hf_config=text)
    )
    view = hook.layer_vllm_config(engine, "model.layers.1.mlp")
    assert view.model_config.hf_text_config.num_experts == 4
    assert view.model_config.hf_config.num_experts == 4
    assert engine.model_config.hf_text_config.num_experts == 8


@pytest.mark.parametrize("layer", [1, 3], ids=["narrow", "widest"])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_fused_shared_expert_follows_its_layers_experts(layer, shared, projection):
    """Shared expert j of layer L sits at slot width(L) + j."""
    config = config_with()
    config.n_shared_experts = shared
    axis = 1 if projection == "down_proj" else 0
    parts = [torch.full((4, 4), float(j)) for j in range(shared)]
    name = f"layers.{layer}.mlp.shared_experts.{projection}.weight"
    placed = dict(
        hook.place_shared_experts([(name, torch.cat(parts, axis))], config, fused=True)
    )
    assert list(placed) == [
        f"layers.{layer}.mlp.experts.{WIDTHS[layer] + j}.{projection}.weight"
        for j in range(shared)
    ]
    for tensor, part in zip(placed.values(), parts, strict=True):
        assert torch.equal(tensor, part)


@pytest.mark.parametrize(
    ("widths", "fused"), [(None, True), (WIDTHS, False)], ids=["equal", "not fused"]
)
def test_shared_experts_are_else_left_to_upstream(widths, fused):
    weights = [("layers.1.mlp.shared_experts.up_proj.weight", torch.zeros(4, 4))]
    placed = list(hook.place_shared_experts(weights, config_with(widths), fused=fused))
    assert placed == weights


def test_other_tensors_pass_unchanged():
    weights = [("layers.1.mlp.experts.0.up_proj.weight", torch.zeros(4, 4))]
    assert (
        list(hook.place_shared_experts(weights, config_with(), fused=True)) == weights
    )


def engine_config(widths=WIDTHS, **options):
    parallel = dict.fromkeys(
        (
            "enable_eplb",
            "enable_elastic_ep",
            "enable_ep_weight_filter",
            "enable_expert_parallel",
        ),
        False,
    )
    sizes = dict.fromkeys(
        ("tensor_parallel_size", "data_parallel_size", "prefill_context_parallel_size"),
        1,
    )
    lora = options.pop("lora_config", None)
    speculative = options.pop("speculative_config", None)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=config_with(widths)),
        parallel_config=SimpleNamespace(**{**parallel, **sizes, **options}),
        lora_config=lora,
        speculative_config=speculative,
    )


@pytest.mark.parametrize(
    "option", ["enable_eplb", "enable_elastic_ep", "enable_ep_weight_filter", "lora"]
)
def test_what_assumes_one_width_is_refused_by_option(option):
    options = {"lora_config": object()} if option == "lora" else {option: True}
    name = "--enable-" + option.removeprefix("enable_").replace("_", "-")
    with pytest.raises(ValueError, match=name):
        hook.refuse_unsupported(engine_config(**options))
    hook.refuse_unsupported(engine_config(widths=None, **options))
    hook.refuse_unsupported(engine_config(widths=[0, 8, 8, 8], **options))


def test_expert_parallel_leaves_no_rank_without_an_expert():
    options = {"enable_expert_parallel": True, "data_parallel_size": 2}
    hook.refuse_unsupported(engine_config(tensor_parallel_size=2, **options))
    with pytest.raises(
        ValueError, match=r"over 6 ranks: layers \[1\].*at most 4 ranks"
    ):
        hook.refuse_unsupported(engine_config(tensor_parallel_size=3, **options))
    # Without it the ranks share every expert.
    hook.refuse_unsupported(engine_config(tensor_parallel_size=8))


def test_a_narrow_draft_counts_only_if_it_is_built():
    widths = [0, 8, 6, 2]
    options = {"enable_expert_parallel": True, "tensor_parallel_size": 4}
    hook.refuse_unsupported(engine_config(widths, **options))
    with pytest.raises(ValueError, match=r"layers \[3\].*at most 2 ranks"):
        hook.refuse_unsupported(
            engine_config(widths, speculative_config=object(), **options)
        )


def test_unequal_widths_alone_are_fine():
    hook.refuse_unsupported(engine_config())


def test_the_engine_asks_for_every_architecture():
    """The check hangs on upstream's per-architecture table."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for architecture in reading.ARCHITECTURES:
        with pytest.raises(ValueError, match="--enable-lora"):
            MODELS_CONFIG_MAP[architecture].verify_and_update_config(
                _complete(engine_config(lora_config=object()))
            )


def _complete(config):
    """Adds what upstream's own checks of these architectures look at."""
    config.model_config.hf_config = SimpleNamespace(index_topk=1)
    config.cache_config = SimpleNamespace(
        cache_dtype="auto", mamba_ssm_cache_dtype="auto", mamba_cache_mode="none"
    )
    config.speculative_config = None
    config.parallel_config.set_dcp_defaults = lambda **_: None
    return config
