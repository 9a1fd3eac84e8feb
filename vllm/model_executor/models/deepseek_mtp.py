# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The MTP draft of DeepSeek-V3, V3.2 and GLM-MoE-DSA.

Its MoE layer is `DeepseekV2MoE`, which takes the draft's own width.
"""

from collections.abc import Iterable

import torch

from vllm.fork import extend
from vllm.model_executor.models import deepseek_mtp_upstream as upstream
from vllm.model_executor.models.dense_dsa import drop_unbuilt_indexers
from vllm.model_executor.models.expert_widths import LoadsByLayerWidth


class DeepSeekMTP(LoadsByLayerWidth, upstream.DeepSeekMTP):
    """The draft, which loads shared experts by each layer's width."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads checkpoint tensors by name, less the indexers of a dense draft."""
        return super().load_weights(drop_unbuilt_indexers(self, weights))


extend(__name__, upstream)
