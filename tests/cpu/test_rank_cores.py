# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Which cores the ranks of a CPU engine are bound to, over made-up machines."""

from types import SimpleNamespace

import pytest

from vllm.platforms import CpuArchEnum
from vllm.platforms.cpu import CpuPlatform
from vllm.utils import cpu_resource_utils, ompmultiprocessing
from vllm.utils.cpu_resource_utils import LogicalCPUInfo
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.worker import cpu_worker


def machine(nodes: int, cores: int, threads: int = 1) -> list[LogicalCPUInfo]:
    """Returns the CPUs of a machine, numbered as Linux numbers x86 hyper-threads."""
    return [
        LogicalCPUInfo(
            id=thread * nodes * cores + core,
            physical_core=core,
            numa_node=core // cores,
        )
        for thread in range(threads)
        for core in range(nodes * cores)
    ]


@pytest.fixture
def bind(monkeypatch):
    """Returns a function from a machine and a number of ranks to the manager."""

    def bind(cpus, ranks, visible=None, arch=CpuArchEnum.X86, cls=OMPProcessManager):
        if visible is None:
            visible = sorted({cpu.numa_node for cpu in cpus})
        monkeypatch.setattr(
            CpuPlatform, "get_cpu_architecture", classmethod(lambda cls: arch)
        )
        monkeypatch.setattr(cpu_resource_utils, "get_allowed_cpu_list", lambda: cpus)
        monkeypatch.setattr(
            cpu_resource_utils, "get_visible_memory_node", lambda *_: visible
        )
        for name in "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU":
            monkeypatch.delenv(name, raising=False)
        parallel = SimpleNamespace(
            local_world_size=ranks,
            data_parallel_rank_local=None,
            assigned_physical_gpu_ids=None,
            _api_process_count=1,
        )
        return cls(SimpleNamespace(parallel_config=parallel, kv_transfer_config=None))

    return bind


@pytest.mark.parametrize(
    ("cpus", "ranks", "cores_of_ranks", "left"),
    [
        (machine(1, 2), 2, [[0], [1]], []),
        (machine(1, 3), 2, [[0], [1]], [2]),
        (machine(1, 8), 2, [[0, 1, 2], [3, 4, 5]], [6, 7]),
        (machine(1, 8), 4, [[0], [1], [2], [3]], [4, 5, 6, 7]),
        (machine(1, 9), 2, [[0, 1, 2], [3, 4, 5, 6]], [7, 8]),
        # One thread of each core, as upstream: the higher sibling.
        (machine(1, 4, threads=2), 2, [[4], [5]], [6, 7]),
        # Two nodes: no rank spans both.
        (machine(2, 4), 4, [[0], [1], [4], [5]], [2, 3, 6, 7]),
        (machine(2, 4), 3, [[0, 1, 2], [4], [5]], [3, 6, 7]),
    ],
)
def test_more_ranks_than_nodes_divide_the_cores(
    bind, cpus, ranks, cores_of_ranks, left
):
    manager = bind(cpus, ranks)
    assert manager.cpu_lists == cores_of_ranks
    assert manager.reserved_cpu_list == left
    assert not manager.skip_setup


@pytest.mark.parametrize(
    ("cpus", "ranks"),
    [
        (machine(1, 2), 1),
        (machine(1, 8, threads=2), 1),
        (machine(2, 4), 2),
        (machine(2, 4), 1),
        (machine(4, 3, threads=2), 3),
    ],
)
def test_a_node_for_each_rank_is_upstreams_case(bind, cpus, ranks):
    ours = bind(cpus, ranks)
    upstreams = bind(cpus, ranks, cls=OMPProcessManager.__base__)
    assert type(ours) is not type(upstreams)
    assert ours.cpu_lists == upstreams.cpu_lists
    assert ours.reserved_cpu_list == upstreams.reserved_cpu_list


def test_upstream_refuses_more_ranks_than_nodes(bind):
    """When this fails, upstream can do it, and ours has done its duty."""
    with pytest.raises(AssertionError, match="Not enough allowed NUMA nodes"):
        bind(machine(1, 2), 2, cls=OMPProcessManager.__base__)


def test_only_visible_nodes_count(bind):
    manager = bind(machine(2, 4), 2, visible=[1])
    assert manager.cpu_lists == [[4], [5]]
    assert manager.reserved_cpu_list == [6, 7]


def test_an_s390x_books_cores_are_divided_though_no_memory_node_has_its_number(bind):
    books = [LogicalCPUInfo(id=i, physical_core=i, numa_node=7) for i in range(4)]
    manager = bind(books, 2, visible=[0], arch=CpuArchEnum.S390X)
    assert manager.cpu_lists == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("upstreams", "nodes"),
    [(lambda: [0, 1], [0, 1]), (lambda assigned_node_ids=None: assigned_node_ids, [1])],
    ids=["0.32", "0.33"],
)
def test_a_config_names_nodes_where_upstream_lets_it(monkeypatch, upstreams, nodes):
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", upstreams)
    config = SimpleNamespace(assigned_physical_gpu_ids=[1])
    assert ompmultiprocessing.memory_nodes(config) == nodes


def test_fewer_cores_than_ranks_start_without_binding(bind, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        ompmultiprocessing.logger,
        "warning",
        lambda message, *arguments: warnings.append(message % arguments),
    )
    manager = bind(machine(1, 2, threads=2), 3)
    assert manager.skip_setup
    (warning,) = warnings
    assert warning == (
        "Threads are not bound to cores: 3 ranks share the 2 cores of NUMA node 0. "
        "Use fewer ranks, or set VLLM_CPU_OMP_THREADS_BIND."
    )


@pytest.mark.parametrize(
    ("ranks", "nodes", "ranks_of_node"),
    [(1, 1, 1), (2, 2, 1), (1, 2, 1), (2, 1, 2), (4, 2, 2), (3, 2, 2)],
)
def test_ranks_of_a_node_divide_its_memory(monkeypatch, ranks, nodes, ranks_of_node):
    def init(self, *_, **__):
        self.requested_cpu_memory = 1200

    monkeypatch.setattr(cpu_worker.CPUWorker.__base__, "__init__", init)
    monkeypatch.setattr(cpu_worker, "memory_nodes", lambda _: range(nodes))
    parallel = SimpleNamespace(local_world_size=ranks, use_ray=False)
    config = SimpleNamespace(parallel_config=parallel)
    worker = cpu_worker.CPUWorker(config, 0, 0, "")
    assert worker.requested_cpu_memory == 1200 // ranks_of_node
