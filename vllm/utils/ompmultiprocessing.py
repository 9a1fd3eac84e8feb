# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Cores for the ranks of a CPU engine, also where ranks share a NUMA node.

See docs/upstream/cpu-ranks-share-a-node.md and ray-cpu.md beside it.
"""

import copy
import os
from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

import vllm.utils.cpu_resource_utils as cr_utils
from vllm.fork import extend
from vllm.logger import init_logger
from vllm.platforms import CpuArchEnum, current_platform
from vllm.utils import ompmultiprocessing_upstream as upstream
from vllm.utils.cpu_resource_utils import LogicalCPUInfo

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger(__name__)


class OMPProcessManager(upstream.OMPProcessManager):
    """Upstream's; more ranks than NUMA nodes divide the nodes' cores."""

    def __init__(self, config: "VllmConfig") -> None:
        self.parallel_config = config.parallel_config
        super().__init__(config)  # which asks for the cores already

    def _get_autobind_cpu_ids(
        self, cpu_selector: Callable[[list[LogicalCPUInfo]], list[LogicalCPUInfo]]
    ) -> tuple[list[list[LogicalCPUInfo]], list[LogicalCPUInfo]]:
        """Returns the CPUs of each local rank, and the CPUs left to other processes.

        Args:
            cpu_selector: Picks from the logical CPUs of one physical core, sorted by
                id, those that carry a thread.
        """
        ranks = self.local_world_size
        nodes = _cores_by_node(cpu_selector, memory_nodes(self.parallel_config))
        if self.simulate_multi_node or not nodes or len(nodes) >= ranks:
            return super()._get_autobind_cpu_ids(cpu_selector)
        try:
            return divide_among_ranks(nodes, ranks, self.reserve_cpu_num)
        except NotEnoughCoresError as error:
            logger.warning("Threads are not bound to cores: %s", error)
            self.skip_setup = True
            return [], []


def bind_this_process(
    vllm_config: "VllmConfig", local_rank: int, local_ranks: int
) -> None:
    """Gives this process the cores of a rank whose environment nobody has prepared.

    An executor that starts ranks itself does so by `OMPProcessManager`, in variables
    that OpenMP reads as it is loaded. Ray starts a rank's process before it is known
    which rank that is, and with one thread.

    Args:
        vllm_config: The engine's.
        local_rank: Index of the rank among those of its Ray node.
        local_ranks: How many ranks that node has.
    """
    of_node = copy.copy(vllm_config)
    of_node.parallel_config = copy.copy(vllm_config.parallel_config)
    of_node.parallel_config.world_size = local_ranks
    manager = OMPProcessManager(of_node)
    if not manager.skip_setup:
        cpus = manager.cpu_lists[local_rank]
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(len(cpus))


def memory_nodes(parallel_config: "ParallelConfig") -> list[int]:
    """Returns the NUMA nodes that the ranks of a config may use.

    vLLM 0.33 lets the config name them, where 0.32 reads the environment alone. Here
    is the one place of the fork that knows.
    """
    if signature(cr_utils.get_visible_memory_node).parameters:
        assigned = parallel_config.assigned_physical_gpu_ids
        return cr_utils.get_visible_memory_node(assigned)
    return cr_utils.get_visible_memory_node()


class NotEnoughCoresError(ValueError):
    """A NUMA node has fewer cores than ranks."""


def divide_among_ranks(
    nodes: list[list[LogicalCPUInfo]], ranks: int, reserve: int
) -> tuple[list[list[LogicalCPUInfo]], list[LogicalCPUInfo]]:
    """Divides the CPUs of fewer nodes than ranks.

    Neighbouring ranks share a node, and no rank spans two. A node's last CPUs are
    left to other processes, as upstream leaves them, unless a rank would get none.

    Args:
        nodes: The CPUs of each node, sorted by id. Fewer nodes than ranks.
        ranks: Local ranks.
        reserve: CPUs to leave, of all nodes together.

    Returns:
        The CPUs of each rank, and those left.

    Raises:
        NotEnoughCoresError: A node has fewer CPUs than ranks.
    """
    cpus_of_ranks: list[list[LogicalCPUInfo]] = []
    left: list[LogicalCPUInfo] = []
    for cpus, (first, end) in zip(nodes, pairwise(_cuts(ranks, len(nodes)))):
        node_ranks = end - first
        if len(cpus) < node_ranks:
            raise NotEnoughCoresError(
                f"{node_ranks} ranks share the {len(cpus)} cores of NUMA node "
                f"{cpus[0].numa_node}. Use fewer ranks, or set "
                "VLLM_CPU_OMP_THREADS_BIND."
            )
        node_reserve = reserve * end // ranks - reserve * first // ranks
        used = cpus[: max(len(cpus) - node_reserve, node_ranks)]
        left += cpus[len(used) :]
        cpus_of_ranks += [used[a:b] for a, b in pairwise(_cuts(len(used), node_ranks))]
    return cpus_of_ranks, left


def _cuts(length: int, parts: int) -> list[int]:
    """Returns where to cut `length` into parts that differ by one at most."""
    return [length * i // parts for i in range(parts + 1)]


def _cores_by_node(
    cpu_selector: Callable[[list[LogicalCPUInfo]], list[LogicalCPUInfo]],
    visible: list[int],
) -> list[list[LogicalCPUInfo]]:
    """Returns the selected CPUs of each NUMA node that is visible."""
    # An s390x CPU's node is the number of its book, which no memory node answers to.
    by_book = current_platform.get_cpu_architecture() == CpuArchEnum.S390X
    cores: dict[tuple[int, int], list[LogicalCPUInfo]] = {}
    for cpu in sorted(cr_utils.get_allowed_cpu_list(), key=lambda cpu: cpu.id):
        if by_book or cpu.numa_node in visible:
            cores.setdefault((cpu.numa_node, cpu.physical_core), []).append(cpu)
    nodes: dict[int, list[LogicalCPUInfo]] = {}
    for (node, _), siblings in cores.items():
        nodes.setdefault(node, []).extend(cpu_selector(siblings))
    return [sorted(nodes[node], key=lambda cpu: cpu.id) for node in sorted(nodes)]


extend(__name__, upstream)
