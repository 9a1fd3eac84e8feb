# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Speed of `ops.linear` beside torch's bf16 product and exllamav3's kernels."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.device import exllamav3_peer
from benchmarks.device.layers import Matrix, random_matrix
from benchmarks.device.timing import copies_beyond_cache, seconds_per_call
from exl3 import ops, workspace

#: k, n: square, an MLP's two, and a head.
SHAPES = ((4096, 4096), (5120, 17408), (17408, 5120), (5120, 248320))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
WORDS = (32, 48, 64, 96)
CODEBOOKS = {"mcg": 1, "mul1": 2}
#: Decoding to a dense matrix for each call makes sense for many rows only, and its
#: float32 matrix must fit.
RECONSTRUCT_FROM = 128
RECONSTRUCT_UP_TO = 2**28  # weights


def cases() -> Iterator[tuple[int, int, int, str, int]]:
    """(rows, k, n, codebook, words), what is asked most first."""
    order = sorted(ROWS, key=lambda rows: (rows not in (1, 8, 32, 512), rows))
    for rows, name, words, (k, n) in itertools.product(order, CODEBOOKS, WORDS, SHAPES):
        yield rows, k, n, name, words


def measure(device: torch.device, bandwidth: float, deadline: float) -> dict[str, Any]:
    """Times every case until the deadline.

    Args:
        device: The GPU.
        bandwidth: Bytes a second that its memory gives.
        deadline: On the clock of time.monotonic.
    """
    skipped = []
    peer, reason = exllamav3_peer.find()
    if peer is None:
        skipped.append(f"exllamav3: {reason}")
    dense: dict[tuple[int, int, int], float] = {}
    matrices: dict[tuple[int, int, int, int], list[Matrix]] = {}
    results = []
    left = 0
    for rows, k, n, codebook, words in cases():
        if time.monotonic() > deadline:
            left += 1
            continue
        key = (k, n, words, CODEBOOKS[codebook])
        if key not in matrices:
            matrices = {key: _copies(*key, device)}
        copies = matrices[key]
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        if (rows, k, n) not in dense:
            dense[rows, k, n] = _dense_seconds(x, n)
        ours = _seconds(x, copies)
        moved = copies[0].bytes + 2 * x.numel() + 2 * rows * n
        result = {
            "rows": rows,
            "k": k,
            "n": n,
            "codebook": codebook,
            "bits": words / 16,
            "plan": list(
                ops.linear_plan(rows, k, copies[0].shards, *workspace.gpu(device))
            ),
            "us": ours * 1e6,
            "percent_of_bandwidth": 100 * moved / ours / bandwidth,
            "tflops": 2 * rows * k * n / ours / 1e12,
            "bf16_us": dense[rows, k, n] * 1e6,
            "times_bf16": dense[rows, k, n] / ours,
        }
        if rows >= RECONSTRUCT_FROM and k * n <= RECONSTRUCT_UP_TO:
            result["reconstruct_us"] = _reconstruct_seconds(x, copies[0]) * 1e6
        if peer is not None:
            try:
                result["exllamav3_us"] = peer.seconds(x.half(), copies) * 1e6
            except Exception as error:  # its interface is its own, and changes
                skipped.append(f"exllamav3: {type(error).__name__}: {error}")
                peer = None
        results.append(result)
    if left:
        skipped.append(f"dense speed: out of time, {left} cases left")
    return {"results": results, "skipped": skipped}


def _copies(
    k: int, n: int, words: int, codebook: int, device: torch.device
) -> list[Matrix]:
    size = k * n * words // 128
    return [
        random_matrix(k, n, words, codebook, device)
        for _ in range(copies_beyond_cache(size, device))
    ]


def _seconds(x: torch.Tensor, copies: list[Matrix]) -> float:
    need = workspace.linear_bytes(len(x), x.shape[1], copies[0].shards, x.device)
    workspace.reserve(x.device, need)
    return seconds_per_call(
        [
            lambda m=matrix: ops.linear(x, m.trellis, m.suh, m.svh, None, m.shards)
            for matrix in copies
        ]
    )


def _dense_seconds(x: torch.Tensor, n: int) -> float:
    k = x.shape[1]
    weights = [
        torch.randn(n, k, device=x.device, dtype=x.dtype)
        for _ in range(min(8, copies_beyond_cache(2 * k * n, x.device)))
    ]
    return seconds_per_call(
        [lambda w=weight: torch.nn.functional.linear(x, w) for weight in weights]
    )


def _reconstruct_seconds(x: torch.Tensor, m: Matrix) -> float:
    def call() -> torch.Tensor:
        weight = ops.dequant(m.trellis, m.suh[0], m.svh, m.k, m.n, m.words, m.codebook)
        return x @ weight.to(x.dtype)

    return seconds_per_call([call])
