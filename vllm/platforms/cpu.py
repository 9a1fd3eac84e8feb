# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What the CPU serves beyond upstream: short sparse attention, MLA in any dtype, Ray.

See docs/upstream/cpu-dsa-as-dense.md, and cpu-mla-dtypes.md, cpu-whole-prompts.md and
ray-cpu.md beside it.
"""

import os
from typing import TYPE_CHECKING

from vllm.fork import extend
from vllm.platforms import cpu_upstream as upstream
from vllm.refusal import RefusedOptionError
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuPlatform(upstream.CpuPlatform):
    """Upstream's CPU platform, with the attention that its kernels can do, and Ray."""

    #: The custom resource by which a Ray node says how many ranks it takes. Ray's own
    #: "CPU" counts cores, and upstream asks for one unit a rank.
    ray_device_key: str = "vllm_cpu"

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Chooses the attention of the model and its draft, then does as upstream.

        Raises:
            RefusedOptionError: The CPU can't do what the options ask for.
        """
        # Imported late: the platform is resolved before most of vLLM can be.
        from vllm.model_executor.models.dense_dsa import attend_densely

        backend = vllm_config.parallel_config.distributed_executor_backend
        # Not from `envs`: later releases have one executor, and no such variable.
        older = os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND") == "0"
        if backend == "ray" and older:
            raise RefusedOptionError(
                "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0: this executor of Ray needs GPUs. "
                "Unset the variable to use Ray on the CPU."
            )
        target, speculative = vllm_config.model_config, vllm_config.speculative_config
        if target is not None:
            attend_densely(target, "CPU")
        if speculative is not None and (draft := speculative.draft_model_config):
            draft.max_model_len = min(draft.max_model_len, target.max_model_len)
            attend_densely(draft, "CPU")
        _choose_mla_backend(vllm_config)
        super().check_and_update_config(vllm_config)
        scheduler = vllm_config.scheduler_config
        if scheduler.max_num_scheduled_tokens and not scheduler.enable_chunked_prefill:
            # Upstream raises the size of a batch to that of a prompt, and not this.
            scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens


def _choose_mla_backend(vllm_config: "VllmConfig") -> None:
    """Chooses CPU_MLA where AMX_MLA, which upstream prefers, has not the dtype.

    Raises:
        RefusedOptionError: AMX_MLA was asked for by name.
    """
    model_config, attention = vllm_config.model_config, vllm_config.attention_config
    if model_config is None or not model_config.use_mla:
        return
    amx = AttentionBackendEnum.AMX_MLA
    if model_config.dtype in amx.get_class().supported_dtypes:
        return
    if attention.backend == amx:
        raise RefusedOptionError(
            f"Attention backend AMX_MLA computes in bfloat16, and the dtype is "
            f"{model_config.dtype}. Leave the backend out, or set --dtype bfloat16."
        )
    attention.backend = AttentionBackendEnum.CPU_MLA


extend(__name__, upstream)
