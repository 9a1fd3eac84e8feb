# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""DeepSeek-V2, V3, V3.2 and GLM-MoE-DSA with a width for every layer."""

from vllm.fork import extend
from vllm.model_executor.models import deepseek_v2_upstream as upstream
from vllm.model_executor.models.expert_widths import (
    BuiltByLayerWidth,
    LoadsByLayerWidth,
)


class DeepseekV2MoE(BuiltByLayerWidth, upstream.DeepseekV2MoE):
    """A MoE layer with its own number of routed experts."""

    places_shared_experts = True


class DeepseekV2Model(LoadsByLayerWidth, upstream.DeepseekV2Model):
    """The decoder, which loads shared experts by each layer's width."""


extend(__name__, upstream)
# Bound in the class body, before the class above existed.
upstream.DeepseekV2ForCausalLM.model_cls = DeepseekV2Model
