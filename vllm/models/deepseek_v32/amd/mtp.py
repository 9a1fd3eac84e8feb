# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The MTP draft of DeepSeek-V3.2 and GLM-MoE-DSA on ROCm."""

from vllm.fork import extend
from vllm.model_executor.models.expert_widths import LoadsByLayerWidth
from vllm.models.deepseek_v32.amd import mtp_upstream as upstream


class DeepseekV32MTP(LoadsByLayerWidth, upstream.DeepseekV32MTP):
    """The draft, which loads shared experts by each layer's width."""


extend(__name__, upstream)
