# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The MTP draft of DeepSeek-V3, V3.2 and GLM-MoE-DSA.

Its MoE layer is `DeepseekV2MoE`, which takes the draft's own width.
"""

from vllm.fork import extend
from vllm.model_executor.models import deepseek_mtp_upstream as upstream
from vllm.model_executor.models.expert_widths import LoadsByLayerWidth


class DeepSeekMTP(LoadsByLayerWidth, upstream.DeepSeekMTP):
    """The draft, which loads shared experts by each layer's width."""


extend(__name__, upstream)
