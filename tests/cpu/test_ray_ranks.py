# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a rank that Ray starts on the CPU needs, without a cluster."""

import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from exl3.format.errors import CheckpointError
from vllm.config import ParallelConfig
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import cpu_communicator
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.platforms import current_platform
from vllm.refusal import RefusedOptionError
from vllm.utils import ompmultiprocessing
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import (
    RayExecutorV2,
    RayWorkerProc,
    initialize_ray_cluster,
)
from vllm.v1.worker import cpu_worker


@pytest.fixture
def ray(monkeypatch):
    """Stands in for Ray, connected to a cluster whose resources a test sets."""
    ray = Mock()
    ray.get_runtime_context().get_node_id.return_value = "node"
    monkeypatch.setattr(ray_executor_v2, "ray", ray)
    return ray


def test_a_rank_is_its_own_device(ray):
    rank = object.__new__(RayWorkerProc)
    rank._init_kwargs = {"rank": 3}
    assert rank.get_node_and_physical_gpu_ids() == ("node", [3])


def test_on_a_gpu_ray_names_the_device(ray, monkeypatch):
    gpu = Mock(ray_device_key="GPU", device_control_id_to_physical_device_id=int)
    gpu.is_cpu.return_value = False
    monkeypatch.setattr(ray_executor_v2, "current_platform", gpu)
    ray.get_runtime_context().get_accelerator_ids.return_value = {"GPU": ["5"]}
    rank = object.__new__(RayWorkerProc)
    assert rank.get_node_and_physical_gpu_ids() == ("node", [5])


def test_a_rank_asks_for_one_place_of_its_node():
    assert RayExecutorV2._get_actor_resource_kwargs() == {
        "num_gpus": 0,
        "resources": {"vllm_cpu": 1.0},
    }


def test_a_cluster_without_places_is_refused_at_once(ray):
    ray.cluster_resources.return_value = {"CPU": 64.0}
    with pytest.raises(RefusedOptionError) as refused:
        initialize_ray_cluster(ParallelConfig(tensor_parallel_size=2))
    assert str(refused.value) == (
        "No node of Ray takes CPU ranks. Start each with ray start "
        """--resources='{"vllm_cpu": N}', N being the ranks that it takes; """
        "2 are needed in all."
    )


def test_too_few_places_are_waited_for_as_upstream_does(ray, monkeypatch):
    ray.cluster_resources.return_value = {"vllm_cpu": 1.0}
    waiting = Mock()
    monkeypatch.setattr(ray_executor_v2, "_upstream_initialize_ray_cluster", waiting)
    config = ParallelConfig(tensor_parallel_size=2)
    initialize_ray_cluster(config, require_gpu_on_driver=False)
    waiting.assert_called_once_with(config, require_gpu_on_driver=False)


def test_the_executor_for_gpus_alone_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    parallel = SimpleNamespace(distributed_executor_backend="ray")
    with pytest.raises(RefusedOptionError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"):
        current_platform.check_and_update_config(
            SimpleNamespace(parallel_config=parallel)
        )


class ActorError(CheckpointError):
    """As Ray makes them: instances of the cause's class, with more to say."""

    def __init__(self, cause):
        super().__init__(f"ray::run()\nTraceback\n{cause}")
        self.cause = cause


def test_a_refusal_of_a_rank_elsewhere_reaches_the_server(monkeypatch, tmp_path):
    def start(executor):
        raise ActorError(CheckpointError("lm_head.suh: no"))

    file = tmp_path / "refusal"
    monkeypatch.setenv("HETERO_REFUSAL_FILE", str(file))
    monkeypatch.setattr(RayExecutorV2.__base__, "_init_executor", start)
    executor = object.__new__(RayExecutorV2)
    executor.vllm_config = SimpleNamespace(model_config=None, speculative_config=None)
    with pytest.raises(ActorError):
        executor._init_executor()
    assert file.read_text() == "lm_head.suh: no\n"


def test_models_folders_are_named_in_full(monkeypatch, tmp_path):
    """The ranks of another node have another working directory."""
    seen = []
    monkeypatch.setattr(
        RayExecutorV2.__base__,
        "_init_executor",
        lambda executor: seen.append(executor.vllm_config),
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    target, draft = SimpleNamespace(model="pack"), SimpleNamespace(model="org/draft")
    executor = object.__new__(RayExecutorV2)
    executor.vllm_config = SimpleNamespace(
        model_config=target,
        speculative_config=SimpleNamespace(draft_model_config=draft),
    )
    executor._init_executor()
    assert seen == [executor.vllm_config]
    assert (target.model, draft.model) == (str(tmp_path / "pack"), "org/draft")


@pytest.mark.parametrize(
    ("same_name", "same_machine", "shared"),
    [(True, [True, True], True), (True, [True, False], False), (False, None, False)],
)
def test_memory_is_shared_within_a_machine_only(
    monkeypatch, same_name, same_machine, shared
):
    monkeypatch.setattr(
        cpu_communicator.CpuCommunicator.__base__,
        "_all_group_ranks_share_shm_group_name",
        lambda communicator: same_name,
    )
    monkeypatch.setattr(
        parallel_state, "in_the_same_node_as", lambda group: same_machine
    )
    communicator = object.__new__(CpuCommunicator)
    communicator.cpu_group = None
    assert communicator._all_group_ranks_share_shm_group_name() is shared


@pytest.fixture
def threads(monkeypatch):
    """The threads and the cores that a process was given."""
    given = {}
    monkeypatch.setattr(torch, "set_num_threads", lambda n: given.update(threads=n))
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cpus: given.update(cores=cpus)
    )
    return given


@pytest.mark.parametrize(
    ("bind", "given"),
    [
        ("0-2|4,5", {"cores": [4, 5], "threads": 2}),
        ("nobind", {}),
    ],
)
def test_a_rank_takes_its_share_of_its_own_node(monkeypatch, threads, bind, given):
    """Two of an engine's four ranks are on this node."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bind)
    parallel = ParallelConfig(tensor_parallel_size=4)
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None)
    ompmultiprocessing.bind_this_process(config, local_rank=1, local_ranks=2)
    assert threads == given
    assert parallel.world_size == 4


@pytest.mark.parametrize(("use_ray", "share"), [(True, 100), (False, 50)])
def test_memory_is_divided_among_the_ranks_of_a_node(monkeypatch, use_ray, share):
    """Of four ranks, two are here. Without Ray, all four are."""

    def init(worker, *args, **kwargs):
        worker.requested_cpu_memory = 200

    bound = []
    monkeypatch.setattr(cpu_worker.CPUWorker.__base__, "__init__", init)
    monkeypatch.setattr(cpu_worker, "memory_nodes", lambda _: [0])
    monkeypatch.setattr(cpu_worker, "bind_this_process", lambda *a: bound.append(a))
    parallel = SimpleNamespace(
        local_world_size=4, use_ray=use_ray, assigned_physical_gpu_ids=[2, 3]
    )
    config = SimpleNamespace(parallel_config=parallel)
    worker = cpu_worker.CPUWorker(config, 1, 3, "tcp://head:1")
    assert worker.requested_cpu_memory == share
    assert bound == ([(config, 1, 2)] if use_ray else [])
    # Ray's ids are ranks; a CPU worker of 0.33 would take them for NUMA nodes.
    assert parallel.assigned_physical_gpu_ids == (None if use_ray else [2, 3])
