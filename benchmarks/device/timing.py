# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Times of launches inside CUDA graphs, and the card's memory bandwidth."""

import statistics
from collections.abc import Callable, Sequence

import torch

#: A replay lasts at least so long, so that its own start does not count.
SHORTEST_REPLAY = 2e-3
REPLAYS = 7


def seconds_per_call(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call, over replays of a graph that has them all in turn.

    Args:
        calls: The same work on different memory, enough of it that none is in the
            cache when its turn comes again (`copies_beyond_cache`).
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # what is lazy happens now, and not in the graph
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    repeats = 1
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for call in calls:
                    call()
        graph.replay()
        times = [_replay_seconds(graph) for _ in range(REPLAYS)]
        median = statistics.median(times)
        if median >= SHORTEST_REPLAY or repeats >= 256:
            return median / (repeats * len(calls))
        repeats *= max(2, min(16, int(SHORTEST_REPLAY / median) + 1))


def copies_beyond_cache(size: int, device: torch.device) -> int:
    """How many copies of so many bytes the cache cannot hold; at least 4."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(4, min(64, -(-3 * cache // max(size, 1))))


def memory_bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes a second that reach memory: copying, and reading alone."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(2**31, free // 4)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copying = seconds_per_call([lambda: target.copy_(source)])
    reading = seconds_per_call([lambda: torch.sum(source)])
    return {"copy": 2 * size / copying, "read": size / reading}


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
