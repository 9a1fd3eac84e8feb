# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The CPU worker, also where several ranks share a NUMA node, and under Ray.

See docs/upstream/cpu-ranks-share-a-node.md and ray-cpu.md beside it.
"""

# First, as it replaces functions of torch that other imports bind.
from vllm.v1.worker import cpu_worker_upstream as upstream  # isort: skip

import math

from vllm.config import VllmConfig
from vllm.fork import extend
from vllm.utils.ompmultiprocessing import bind_this_process, memory_nodes


class CPUWorker(upstream.CPUWorker):
    """Upstream's, which takes its share of the memory that a node may give."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ):
        parallel_config = vllm_config.parallel_config
        ranks = parallel_config.local_world_size
        if parallel_config.use_ray:
            # The size above takes all ranks for local ones; these ids are this node's.
            assert parallel_config.assigned_physical_gpu_ids is not None
            ranks = len(parallel_config.assigned_physical_gpu_ids)
            # They have served: to a CPU such ids are NUMA nodes, from 0.33 on.
            parallel_config.assigned_physical_gpu_ids = None
            bind_this_process(vllm_config, local_rank, ranks)
        super().__init__(
            vllm_config,
            local_rank,
            rank,
            distributed_init_method,
            is_driver_worker=is_driver_worker,
        )
        # `gpu_memory_utilization` is a fraction of the node's memory, so it bounds
        # the ranks of that node together.
        ranks_of_node = math.ceil(ranks / len(memory_nodes(parallel_config)))
        self.requested_cpu_memory //= ranks_of_node


extend(__name__, upstream)
