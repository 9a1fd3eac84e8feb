# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Qwen3-Next with a width for every layer.

Qwen3.5-MoE and the MTP drafts build their MoE layers on this one.
"""

from vllm.fork import extend
from vllm.model_executor.models import qwen3_next_upstream as upstream
from vllm.model_executor.models.expert_widths import BuiltByEngineWidth


class Qwen3NextSparseMoeBlock(BuiltByEngineWidth, upstream.Qwen3NextSparseMoeBlock):
    """A MoE layer with its own number of routed experts."""


extend(__name__, upstream)
