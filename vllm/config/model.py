# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Extends upstream's check of a model against the ranks that are to share it."""

from typing import TYPE_CHECKING

from exl3.checkpoint.ranks import check_tensor_parallel, expert_part
from vllm.config import model_upstream as upstream
from vllm.fork import extend
from vllm.transformers_utils.checkpoint import known_checkpoint
from vllm.transformers_utils.exl3 import QUANT_METHOD

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig


def _verify_with_parallel_config(
    self: upstream.ModelConfig, parallel_config: "ParallelConfig"
) -> None:
    """Upstream's checks, and whether an EXL3 checkpoint can be cut for the ranks.

    Raises:
        RankError: It cannot. Names the tensor, and the sizes that are possible.
    """
    _upstream_verify(self, parallel_config)
    if self.quantization != QUANT_METHOD:
        return
    checkpoint = known_checkpoint(self.model, self.revision)
    if checkpoint is None or parallel_config.enable_expert_parallel:
        return
    plan = checkpoint.plan
    tensor_parallel = parallel_config.tensor_parallel_size
    # Without expert parallelism vLLM cuts experts for the data parallel ranks too.
    ranks = tensor_parallel * parallel_config.data_parallel_size
    ranks *= parallel_config.prefill_context_parallel_size
    if ranks == tensor_parallel:
        check_tensor_parallel(plan, self.hf_config.to_dict(), ranks)
    else:
        for name, layer in plan.experts.items():
            expert_part(layer, name, ranks, 0)


_upstream_verify = upstream.ModelConfig.verify_with_parallel_config
upstream.ModelConfig.verify_with_parallel_config = _verify_with_parallel_config
extend(__name__, upstream)
