# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""DeepSeek-V3.2 and GLM-MoE-DSA on ROCm, with a width for every layer."""

from vllm.fork import extend
from vllm.model_executor.models.expert_widths import LoadsByLayerWidth
from vllm.models.deepseek_v32.amd import model_upstream as upstream


class DeepseekV32Model(LoadsByLayerWidth, upstream.DeepseekV32Model):
    """The decoder, which loads shared experts by each layer's width."""


extend(__name__, upstream)
# Bound in the class body, before the class above existed.
upstream.DeepseekV32ForCausalLM.model_cls = DeepseekV32Model
