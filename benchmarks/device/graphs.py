# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The ops in CUDA graphs, on two streams at once, as vLLM runs shared experts."""

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.device.correctness import run_moe
from benchmarks.device.layers import Experts, Matrix, random_experts, random_matrix
from exl3 import ops, workspace

TOKENS = (1, 8, 40)
REPLAYS = 20


def check(device: torch.device, deadline: float) -> dict[str, Any]:
    """Replays give what launches give, bit for bit, with new inputs each time."""
    hidden, intermediate, width, top_k = 1024, 512, 16, 4
    experts = random_experts(hidden, intermediate, [48, 64] * 8, 1, device)
    matrix = random_matrix(hidden, hidden, 64, 1, device)
    failures = []
    for tokens in TOKENS:
        if time.monotonic() > deadline:
            return {"failures": [*failures, "out of time"]}
        moe = workspace.moe_bytes(tokens, top_k, hidden, intermediate, width, 1, device)
        workspace.reserve(device, moe, 0)
        need = workspace.linear_bytes(tokens, hidden, matrix.shards, device)
        workspace.reserve(device, need, 1)
        x = torch.zeros(tokens, hidden, device=device, dtype=torch.bfloat16)
        ids = torch.zeros(tokens, top_k, device=device, dtype=torch.int64)
        weights = torch.rand(tokens, top_k, device=device)
        side = torch.cuda.Stream()
        _layer(experts, matrix, x, ids, weights, side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = _layer(experts, matrix, x, ids, weights, side)
        for _ in range(REPLAYS):
            x.copy_(torch.randn(x.shape))
            ids.copy_(torch.stack([torch.randperm(width)[:top_k] for _ in x]))
            graph.replay()
            got = replayed.clone()
            if not torch.equal(got, _layer(experts, matrix, x, ids, weights, side)):
                failures.append(f"{tokens} tokens: a graph's replay differs")
                break
    return {"cases": len(TOKENS) * REPLAYS, "failures": failures}


def _layer(
    experts: Experts,
    matrix: Matrix,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    side: torch.cuda.Stream,
) -> Tensor:
    """Routed experts, and a linear beside them on the other stream."""
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        beside = ops.linear(
            x,
            matrix.trellis,
            matrix.suh,
            matrix.svh,
            None,
            matrix.shards,
            workspace=1,
        )
    routed = run_moe(experts, x, ids, weights)
    main.wait_stream(side)
    return routed + beside
