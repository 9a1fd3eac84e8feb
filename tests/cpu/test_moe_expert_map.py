# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Expert parallelism on the CPU: each rank computes its own experts, and no other."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    CPUUnquantizedExperts,
    localize_routing,
)

HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 64, 32, 9, 2
# Seven experts on two ranks, unevenly, as a pruned layer has them.
EXPERTS, SPLIT = 7, 4


def expert_map(held: range) -> torch.Tensor:
    local = torch.full((EXPERTS,), -1, dtype=torch.int32)
    local[held.start : held.stop] = torch.arange(len(held), dtype=torch.int32)
    return local


def test_remote_experts_get_weight_zero():
    ids = torch.tensor([[0, 5], [6, 4]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    held = expert_map(range(SPLIT, EXPERTS))
    local, kept, remote = localize_routing(ids, weights, held)
    assert remote.tolist() == [[True, False], [False, False]]
    assert local.tolist() == [[0, 1], [2, 0]]
    assert kept.tolist() == [[0.0, 0.75], [0.5, 0.5]]
    assert local.dtype == ids.dtype


def reference(x, w13, w2, ids, weights):
    """Sum over the chosen experts of weight * w2(silu(gate) * up), in float64."""
    x, w13, w2 = x.double(), w13.double(), w2.double()
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            gate, up = (w13[expert] @ x[token]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            out[token] += weight.double() * (w2[expert] @ hidden)
    return out


def run_rank(x, w13, w2, ids, weights, held, *, on_input=False):
    """One rank's part of the layer by the kernel, over the experts that it holds."""
    config = SimpleNamespace(
        intermediate_size_per_partition=INTERMEDIATE, activation=MoEActivation.SILU
    )
    experts = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
    experts.moe_config, experts._use_zentorch = config, False
    experts.quant_config = SimpleNamespace(w1_bias=None, w2_bias=None)
    layer = torch.nn.Module()
    local = slice(held.start, held.stop)
    layer.w13_weight = torch.nn.Parameter(w13[local].clone(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(w2[local].clone(), requires_grad=False)
    experts.process_weights_after_loading(layer)
    out = torch.full_like(x, torch.nan)
    experts.apply(
        output=out,
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=weights,
        topk_ids=ids,
        activation=MoEActivation.SILU,
        global_num_experts=EXPERTS,
        expert_map=expert_map(held),
        a1q_scale=None,
        a2_scale=None,
        workspace13=torch.empty(0),
        workspace2=torch.empty(0),
        expert_tokens_meta=None,
        apply_router_weight_on_input=on_input,
    )
    return out


@pytest.fixture
def layer():
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    weights = torch.rand(TOKENS, TOP_K)
    return x, w13, w2, ids, weights


def test_the_ranks_add_up_to_the_layer(layer):
    parts = [run_rank(*layer, range(SPLIT)), run_rank(*layer, range(SPLIT, EXPERTS))]
    # float32 sums of at most 64 products: 64 * 2^-24 of sums of order 1.
    torch.testing.assert_close(
        sum(parts).double(), reference(*layer), rtol=1e-5, atol=1e-5
    )
    assert all(part.abs().max() > 0.1 for part in parts)


def test_a_weight_on_the_input_keeps_remote_tokens_out(layer):
    """With top-k 1 the routing weight is in the input, and cannot mask the output."""
    x, w13, w2, ids, _ = layer
    ids, ones = ids[:, :1].contiguous(), torch.ones(TOKENS, 1)
    parts = [
        run_rank(x, w13, w2, ids, ones, held, on_input=True)
        for held in (range(SPLIT), range(SPLIT, EXPERTS))
    ]
    torch.testing.assert_close(
        sum(parts).double(), reference(x, w13, w2, ids, ones), rtol=1e-5, atol=1e-5
    )


def test_every_kind_of_cpu_experts_is_covered():
    classes = [
        cls
        for cls in vars(cpu_moe._upstream).values()
        if isinstance(cls, type)
        and issubclass(cls, modular_kernel.FusedMoEExpertsModular)
        and "apply" in vars(cls)
    ]
    assert len(classes) >= 9
    for cls in classes:
        assert hasattr(cls.apply, "__wrapped__"), cls.__name__
