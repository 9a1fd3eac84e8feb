# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Shares a budget of bits among experts, by how much each one's errors matter."""

import heapq
from collections.abc import Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")

#: Mean squared error of a trellis of so many bits, as a share of the weights' mean
#: square (Gaussian weights, tail-biting trellis of 16-bit states). A bit more leaves
#: about a quarter.
RELATIVE_ERROR = {
    1: 0.266,
    2: 0.069,
    3: 0.0172,
    4: 0.0044,
    5: 0.0011,
    6: 0.00030,
    7: 0.00008,
    8: 0.00002,
}


def allocate_bits(
    sensitivities: Mapping[Key, float], mean_bits: float, choices: Sequence[int]
) -> dict[Key, int]:
    """Gives every expert a bitrate so that the sum of errors is the smallest.

    The experts are of one size. Errors fall by less with every bit, so giving one bit
    after the other to whoever gains most is the best that can be done.

    Args:
        sensitivities: How much an error of an expert matters: the loss is expected to
            grow by this times the relative error of its weights.
        mean_bits: The mean to reach, from above zero to half a step below it.
        choices: Bitrates that an expert may have.

    Returns:
        Bits by expert, in the order of `sensitivities`.

    Raises:
        ValueError: The mean is outside the choices.
    """
    ladder = sorted(set(choices))
    if not ladder or not ladder[0] <= mean_bits <= ladder[-1]:
        raise ValueError(f"mean of {mean_bits} bits: the choices are {ladder}")
    rung = dict.fromkeys(sensitivities, 0)
    spare = round(len(rung) * (mean_bits - ladder[0]))
    order = {key: number for number, key in enumerate(rung)}

    def offer(key: Key) -> tuple[float, int, Key] | None:
        """What a bit more would save, negated: the heap's least is the best."""
        if rung[key] + 1 == len(ladder):
            return None
        low, high = ladder[rung[key] : rung[key] + 2]
        saved = RELATIVE_ERROR[low] - RELATIVE_ERROR[high]
        return -sensitivities[key] * saved / (high - low), order[key], key

    offers = [found for key in rung if (found := offer(key)) is not None]
    heapq.heapify(offers)
    while offers and spare:
        key = heapq.heappop(offers)[-1]
        step = ladder[rung[key] + 1] - ladder[rung[key]]
        if step > spare:
            continue
        spare -= step
        rung[key] += 1
        found = offer(key)
        if found is not None:
            heapq.heappush(offers, found)
    return {key: ladder[at] for key, at in rung.items()}
