# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Speed of `ops.moe` for one layer of a large model."""

import time
from typing import Any

import torch

from benchmarks.device.correctness import run_moe
from benchmarks.device.layers import Experts, random_experts
from benchmarks.device.timing import copies_beyond_cache, seconds_per_call
from exl3 import workspace

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 4096, 1024, 256, 8
TOKENS = (1, 4, 8, 32, 128, 1024)
#: Words of the experts' tiles, in turn.
MIXES = {"3 bits": [48], "4 bits": [64], "2, 3 and 4 bits": [32, 48, 64]}
CODEBOOKS = {"mcg": 1, "mul1": 2}


def measure(device: torch.device, bandwidth: float, deadline: float) -> dict[str, Any]:
    """Times every case until the deadline; arguments as for dense_speed."""
    results = []
    left = 0
    for mix, words in MIXES.items():
        each = [words[e % len(words)] for e in range(EXPERTS)]
        for codebook, code in CODEBOOKS.items():
            experts = random_experts(HIDDEN, INTERMEDIATE, each, code, device)
            for tokens in TOKENS:
                if time.monotonic() > deadline:
                    left += 1
                    continue
                seconds, read = _seconds(experts, tokens, device)
                flops = 6 * tokens * TOP_K * HIDDEN * INTERMEDIATE
                results.append(
                    {
                        "experts": mix,
                        "codebook": codebook,
                        "tokens": tokens,
                        "us": seconds * 1e6,
                        "percent_of_bandwidth": 100 * read / seconds / bandwidth,
                        "tflops": flops / seconds / 1e12,
                    }
                )
    skipped = [f"moe speed: out of time, {left} cases left"] if left else []
    return {"results": results, "skipped": skipped}


def _seconds(
    experts: Experts, tokens: int, device: torch.device
) -> tuple[float, float]:
    """Time of one call, and the bytes of the experts that it reads."""
    need = workspace.moe_bytes(tokens, TOP_K, HIDDEN, INTERMEDIATE, EXPERTS, 1, device)
    workspace.reserve(device, need)
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    weights = torch.rand(tokens, TOP_K, device=device)
    # Other experts each time, so that the cache holds none.
    least = experts.bytes * TOP_K // EXPERTS
    choices = [
        torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).to(device)
        for _ in range(copies_beyond_cache(least, device))
    ]
    chosen = sum(len(ids.unique()) for ids in choices) / len(choices)
    seconds = seconds_per_call(
        [lambda ids=ids: run_moe(experts, x, ids, weights) for ids in choices]
    )
    return seconds, chosen / EXPERTS * experts.bytes
