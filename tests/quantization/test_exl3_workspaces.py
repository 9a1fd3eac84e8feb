# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Every EXL3 layer gets a workspace, and those that may overlap get different ones."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from exl3 import workspace

TOKENS, RANKS = 96, 2
CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
    parallel_config=SimpleNamespace(data_parallel_size=RANKS, use_ubatching=False),
)


def linear(k: int) -> nn.Module:
    from vllm.model_executor.layers.quantization.exl3.linear import Exl3LinearMethod

    layer = nn.Module()
    layer.suh = nn.Parameter(torch.empty(1, k, dtype=torch.float16))
    layer.quant_method = Exl3LinearMethod("a", {})
    layer.quant_method.layout = [128, 0, 128, 64, 1]
    return layer


def experts() -> nn.Module:
    from vllm.model_executor.layers.quantization.exl3.experts import Exl3ExpertsMethod

    layer = nn.Module()
    layer.w2_suh = nn.Parameter(torch.empty(10, 256, dtype=torch.float16))
    method = object.__new__(Exl3ExpertsMethod)
    method.moe = SimpleNamespace(experts_per_token=3)
    method.stored = SimpleNamespace(hidden=512)
    method.part = SimpleNamespace(slices=range(2))
    layer.quant_method = method
    return layer


@pytest.fixture
def model() -> nn.Module:
    """A linear, routed experts with shared ones beside them, and a norm."""
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import (
        SharedExperts,
    )

    beside = SharedExperts.__new__(SharedExperts)
    nn.Module.__init__(beside)
    model = nn.Module()
    model.norm = nn.LayerNorm(4)
    model.proj = linear(384)
    model.shared_mlp = nn.Sequential(linear(256))  # by any name
    beside.layer = model.shared_mlp
    model.experts = experts()
    model.experts.shared = beside
    return model


@pytest.fixture
def reserved(monkeypatch) -> list[tuple[int, int]]:
    """(index, bytes) of each reservation; the bytes tell what was asked about."""
    calls: list[tuple[int, int]] = []

    def linear_bytes(rows, k, shards, device):
        assert rows >= 2**31 and shards == [128, 0, 128, 64, 1]
        return k

    def moe_bytes(*sizes):
        assert sizes == (TOKENS * RANKS, 3, 512, 256, 10, 2, torch.device("cpu"))
        return 1

    monkeypatch.setattr(workspace, "linear_bytes", linear_bytes)
    monkeypatch.setattr(workspace, "moe_bytes", moe_bytes)
    monkeypatch.setattr(
        workspace, "reserve", lambda device, size, index: calls.append((index, size))
    )
    return calls


@pytest.mark.parametrize(("draft", "base"), [(False, 0), (True, 2)])
def test_layers_that_overlap_have_different_workspaces(model, reserved, draft, base):
    from vllm.model_executor.layers.quantization.exl3.workspaces import (
        reserve_workspaces,
    )

    reserve_workspaces(model, CONFIG, draft)
    assert sorted(reserved) == [(base, 1), (base, 384), (base + 1, 256)]
    assert model.proj.quant_method.workspace == base
    assert model.experts.quant_method.workspace == base
    assert model.shared_mlp[0].quant_method.workspace == base + 1


@pytest.mark.parametrize("device", ("cpu", "cuda:0"))
def test_two_batches_at_once_are_refused_on_cuda(reserved, monkeypatch, device):
    """They would share the workspace; on the CPU there is none."""
    from vllm.model_executor.layers.quantization.exl3.workspaces import (
        reserve_workspaces,
    )
    from vllm.refusal import RefusedOptionError

    model = nn.Module()
    model.proj = linear(128)
    del model.proj.suh
    model.proj.suh = SimpleNamespace(device=torch.device(device), shape=(1, 128))
    parallel = SimpleNamespace(data_parallel_size=1, use_ubatching=True)
    config = SimpleNamespace(**vars(CONFIG) | {"parallel_config": parallel})
    if device == "cpu":
        reserve_workspaces(model, config, False)
        assert reserved == [(0, 128)]
    else:
        with pytest.raises(RefusedOptionError, match="--enable-dbo"):
            reserve_workspaces(model, config, False)
        assert reserved == []


def test_on_the_cpu_nothing_is_reserved():
    cpu = torch.device("cpu")
    assert workspace.clamped(cpu) == 0
    assert workspace.linear_bytes(1, 128, [128, 0, 128, 64, 1], cpu) == 0
    assert workspace.moe_bytes(1, 1, 128, 128, 1, 1, cpu) == 0
    workspace.reserve(cpu, 2**40)
