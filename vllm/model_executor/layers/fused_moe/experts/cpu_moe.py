# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Expert parallelism on the CPU: a rank computes the experts that it holds.

Upstream's CPU experts take an expert map and do not use it, so that they read a
rank's weights by global ids: past their end, or another expert's. See
docs/upstream/cpu-moe-expert-map.md.
"""

from functools import wraps
from typing import Any

import torch

from vllm.fork import extend
from vllm.model_executor.layers.fused_moe.experts import cpu_moe_upstream as upstream


def localize_routing(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Routing by a rank's own expert ids.

    An expert that another rank holds becomes local expert 0 with weight 0: the
    kernels know no id that stands for "none".

    Args:
        topk_ids: Global expert ids, `[num_tokens, top_k]` int.
        topk_weights: Routing weights, `[num_tokens, top_k]` float.
        expert_map: Local id of each global one, -1 for a remote one,
            `[global_num_experts]` int.

    Returns:
        Local ids and weights, contiguous, of the types that came in; and which of
        them are of remote experts, `[num_tokens, top_k]` bool.
    """
    local = expert_map[topk_ids.long()]
    remote = local < 0
    ids = local.masked_fill(remote, 0).to(topk_ids.dtype)
    weights = topk_weights.masked_fill(remote, 0.0)
    return ids.contiguous(), weights.contiguous(), remote


def _by_local_experts(apply: Any) -> Any:
    """Wraps a class's `apply`, which upstream calls by keywords only."""

    @wraps(apply)
    def localized(self: Any, **arguments: Any) -> Any:
        expert_map = arguments["expert_map"]
        if expert_map is None:
            return apply(self, **arguments)
        ids, weights, remote = localize_routing(
            arguments["topk_ids"], arguments["topk_weights"], expert_map
        )
        arguments.update(topk_ids=ids, topk_weights=weights)
        result = apply(self, **arguments)
        if arguments["apply_router_weight_on_input"]:
            # Only with top_k 1. The weight is in the input, so the zero did nothing.
            arguments["output"].masked_fill_(remote, 0.0)
        return result

    return localized


# One by one, so that the drift check sees each; a test fails if upstream adds one.
upstream.CPUUnquantizedExperts.apply = _by_local_experts(
    upstream.CPUUnquantizedExperts.apply
)
upstream.CPUExpertsFp8.apply = _by_local_experts(upstream.CPUExpertsFp8.apply)
upstream.CPUExpertsMxfp4.apply = _by_local_experts(upstream.CPUExpertsMxfp4.apply)
upstream.CPUExpertsInt4.apply = _by_local_experts(upstream.CPUExpertsInt4.apply)
upstream.CPUExpertsInt8.apply = _by_local_experts(upstream.CPUExpertsInt8.apply)
upstream.ArmCPUExpertsInt8.apply = _by_local_experts(upstream.ArmCPUExpertsInt8.apply)
upstream.PowerCPUExpertsInt8.apply = _by_local_experts(
    upstream.PowerCPUExpertsInt8.apply
)
upstream.ZenCPUExpertsInt8.apply = _by_local_experts(upstream.ZenCPUExpertsInt8.apply)
upstream.CPUExpertsFp8W8A8.apply = _by_local_experts(upstream.CPUExpertsFp8W8A8.apply)

extend(__name__, upstream)
