# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Qwen3-MoE with a width for every layer."""

from vllm.fork import extend
from vllm.model_executor.models import qwen3_moe_upstream as upstream
from vllm.model_executor.models.expert_widths import BuiltByEngineWidth


class Qwen3MoeSparseMoeBlock(BuiltByEngineWidth, upstream.Qwen3MoeSparseMoeBlock):
    """A MoE layer with its own number of routed experts."""


extend(__name__, upstream)
