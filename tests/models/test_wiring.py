# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Every model that should build its layers by width does, on every platform.

The classes of CUDA and ROCm cannot run here, but they can be imported, and what counts
is which MoE layer and which loader their modules name.
"""

from importlib import import_module

import pytest

from vllm.model_executor.models.expert_widths import (
    BuiltByEngineWidth,
    BuiltByLayerWidth,
    LoadsByLayerWidth,
)

MODELS = "vllm.model_executor.models"
DSA = "vllm.models.deepseek_v32"

BUILT_BY_LAYER = [
    (f"{MODELS}.deepseek_v2", "DeepseekV2MoE"),
    (f"{MODELS}.deepseek_v2_upstream", "DeepseekV2MoE"),
    (f"{DSA}.nvidia.model", "DeepseekV2MoE"),
    (f"{DSA}.nvidia.mtp", "DeepseekV2MoE"),
    (f"{DSA}.amd.model_upstream", "DeepseekV2MoE"),
    (f"{DSA}.amd.mtp_upstream", "DeepseekV2MoE"),
    (f"{MODELS}.glm4_moe_upstream", "Glm4MoE"),
    (f"{MODELS}.glm4_moe_mtp", "Glm4MoE"),
    (f"{MODELS}.glm4_moe_lite", "Glm4MoeLite"),
    (f"{MODELS}.glm4_moe_lite_mtp", "Glm4MoeLite"),
]
BUILT_BY_ENGINE = [
    (f"{MODELS}.qwen3_moe_upstream", "Qwen3MoeSparseMoeBlock"),
    (f"{MODELS}.qwen3_next_upstream", "Qwen3NextSparseMoeBlock"),
    (f"{MODELS}.qwen3_next_mtp", "Qwen3NextSparseMoeBlock"),
]
LOADS = [
    (f"{MODELS}.deepseek_v2_upstream", "DeepseekV2Model"),
    (f"{MODELS}.deepseek_mtp_upstream", "DeepSeekMTP"),
    (f"{DSA}.amd.model_upstream", "DeepseekV32Model"),
    (f"{DSA}.amd.mtp_upstream", "DeepseekV32MTP"),
]


@pytest.mark.parametrize(
    ("module", "name", "mixin"),
    [
        *((*entry, BuiltByLayerWidth) for entry in BUILT_BY_LAYER),
        *((*entry, BuiltByEngineWidth) for entry in BUILT_BY_ENGINE),
        *((*entry, LoadsByLayerWidth) for entry in LOADS),
    ],
)
def test_the_module_names_the_forks_class(module, name, mixin):
    # Nobody imports upstream's half but the fork's, which changes it.
    import_module(module.removesuffix("_upstream"))
    assert issubclass(getattr(import_module(module), name), mixin)


@pytest.mark.parametrize(
    ("module", "architecture"),
    [
        (f"{MODELS}.deepseek_v2", "DeepseekV2ForCausalLM"),
        (f"{MODELS}.deepseek_v2", "DeepseekV3ForCausalLM"),
        (f"{MODELS}.deepseek_v2", "GlmMoeDsaForCausalLM"),
        (f"{DSA}.amd.model", "DeepseekV32ForCausalLM"),
    ],
)
def test_the_architecture_builds_the_forks_decoder(module, architecture):
    built = getattr(import_module(module), architecture).model_cls
    assert issubclass(built, LoadsByLayerWidth)


def test_the_registry_finds_the_forks_draft():
    from vllm.model_executor.models.registry import ModelRegistry

    draft = ModelRegistry._try_load_model_cls("DeepSeekMTPModel")
    assert issubclass(draft, LoadsByLayerWidth)


def test_fused_shared_experts_are_refused_where_nothing_places_them():
    from types import SimpleNamespace

    from vllm.model_executor.models.glm4_moe import Glm4MoE

    layer = Glm4MoE.__new__(Glm4MoE)
    layer.__dict__["is_fused_shared_expert_enabled"] = True
    unequal = SimpleNamespace(resolved_expert_widths=[0, 4], num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp: Glm4MoE cannot"):
        layer._refuse_fused_shared_experts(unequal, "model.layers.1.mlp")
    equal = SimpleNamespace(num_hidden_layers=2)
    layer._refuse_fused_shared_experts(equal, "model.layers.1.mlp")
