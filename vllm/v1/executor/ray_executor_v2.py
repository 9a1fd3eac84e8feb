# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Ray's executor, also on the CPU platform. See docs/upstream/ray-cpu.md."""

from pathlib import Path
from typing import Any

import ray

from vllm.config import ParallelConfig, VllmConfig
from vllm.fork import extend
from vllm.platforms import current_platform
from vllm.refusal import RefusedOptionError, leaving_refusals
from vllm.v1.executor import ray_executor_v2_upstream as upstream

_upstream_initialize_ray_cluster = upstream.initialize_ray_cluster


class RayWorkerProc(upstream.RayWorkerProc):
    """Upstream's, which a CPU rank can be too."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Returns the Ray node of this rank, and the ids of its devices there.

        Ray numbers the units of accelerators that it knows, not those of a custom
        resource. A CPU rank is a device of its own, so its rank is the id.
        """
        if not current_platform.is_cpu():
            return super().get_node_and_physical_gpu_ids()
        node_id = ray.get_runtime_context().get_node_id()
        return node_id, [self._init_kwargs["rank"]]


class RayExecutorV2(upstream.RayExecutorV2):
    """Upstream's, which hands a rank's refusal on to the server."""

    def _init_executor(self) -> None:
        _name_folders_in_full(self.vllm_config)
        # What a rank on another machine raises arrives here and nowhere else.
        with leaving_refusals():
            super()._init_executor()


def _name_folders_in_full(vllm_config: VllmConfig) -> None:
    """Makes models' folders absolute: ranks have the working directory of their node.

    They would ask the hub for a relative one that isn't there.
    """
    models = [vllm_config.model_config]
    if vllm_config.speculative_config is not None:
        models.append(vllm_config.speculative_config.draft_model_config)
    for model in models:
        if model is not None and (folder := Path(model.model)).is_dir():
            model.model = str(folder.absolute())


def initialize_ray_cluster(
    parallel_config: ParallelConfig, *args: Any, **kwargs: Any
) -> None:
    """Connects to Ray and reserves a place for each rank, as upstream does.

    Raises:
        RefusedOptionError: No node takes ranks of the CPU. Upstream would wait half an
            hour for one.
    """
    if current_platform.is_cpu():
        if not ray.is_initialized():
            ray.init(runtime_env=parallel_config.ray_runtime_env)
        key = current_platform.ray_device_key
        if not ray.cluster_resources().get(key):
            raise RefusedOptionError(
                "No node of Ray takes CPU ranks. Start each with ray start --resources="
                f"'{{\"{key}\": N}}', N being the ranks that it takes; "
                f"{parallel_config.world_size} are needed in all."
            )
    _upstream_initialize_ray_cluster(parallel_config, *args, **kwargs)


extend(__name__, upstream)
