# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reserves the memory that the CUDA ops of a model's layers work in.

That happens when a model is created, so before vLLM measures what is left for the KV
cache. Layers that run one after another share a workspace. Shared experts have one of
their own, since vLLM runs them beside the routed ones, on another stream; and so has a
draft.
"""

import sys

from torch import nn

from exl3 import workspace
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
from vllm.model_executor.layers.quantization.exl3.experts import Exl3ExpertsMethod
from vllm.model_executor.layers.quantization.exl3.linear import Exl3LinearMethod
from vllm.refusal import RefusedOptionError

#: Workspaces of the target; a draft's are the two after them.
_LAYERS, _SHARED_EXPERTS = 0, 1
_OF_DRAFT = 2
#: The op works on so many rows as fit its own bound, so any number will do.
_ANY_ROWS = sys.maxsize


def reserve_workspaces(model: nn.Module, config: VllmConfig, draft: bool) -> None:
    """Gives every EXL3 layer of a model its workspace.

    Args:
        model: With its layers built.
        config: The engine's.
        draft: Whether this is a draft model.

    Raises:
        RefusedOptionError: Two halves of a batch would work in one workspace at once.
        PlanError: The file of measured plans cannot be used.
    """
    beside = {
        layer
        for shared in model.modules()
        if isinstance(shared, SharedExperts)
        for layer in shared.modules()
    }
    tokens = (
        config.scheduler_config.max_num_batched_tokens
        * config.parallel_config.data_parallel_size
    )
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, Exl3LinearMethod):
            device = layer.suh.device
            size = workspace.linear_bytes(
                _ANY_ROWS, layer.suh.shape[1], method.layout, device
            )
        elif isinstance(method, Exl3ExpertsMethod):
            device = layer.w2_suh.device
            virtual_experts, intermediate = layer.w2_suh.shape
            size = workspace.moe_bytes(
                tokens,
                method.moe.experts_per_token,
                method.stored.hidden,
                intermediate,
                virtual_experts,
                len(method.part.slices),
                device,
            )
        else:
            continue
        if device.type == "cuda" and config.parallel_config.use_ubatching:
            raise RefusedOptionError(
                "--enable-dbo and --ubatch-size: not supported for EXL3 on CUDA, whose "
                "layers would work in one workspace for two batches at once; leave "
                "them out"
            )
        index = _SHARED_EXPERTS if layer in beside else _LAYERS
        method.workspace = index + (_OF_DRAFT if draft else 0)
        workspace.reserve(device, size, method.workspace)
