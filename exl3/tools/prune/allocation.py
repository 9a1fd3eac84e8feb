# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Which experts stay: the best of each layer, and more where more are worth it."""

from collections.abc import Mapping, Sequence

from exl3.tools.prune.layers import RoutedLayer

#: Experts that stay, in ascending order, by global layer index.
Kept = dict[int, tuple[int, ...]]
#: A score for each expert, by global layer index.
Scores = Mapping[int, Sequence[float]]


def ranked(layer: RoutedLayer, scores: Sequence[float]) -> list[tuple[int, ...]]:
    """The experts in the order in which they are kept: rank 0 is the last to go.

    With grouped routing a rank is one expert of every group, the groups being of one
    size. So every expert stays in its group, and the choice among those that stay is
    what it was.
    """
    size = layer.width // layer.routing.groups

    def best_first(group: int) -> list[int]:
        experts = range(group * size, (group + 1) * size)
        return sorted(experts, key=lambda expert: -scores[expert])

    return list(zip(*map(best_first, range(layer.routing.groups))))


def best(layer: RoutedLayer, scores: Sequence[float], width: int) -> tuple[int, ...]:
    """The experts that a layer of this width keeps.

    Args:
        layer: The layer.
        scores: What each of its experts is worth.
        width: A multiple of the router's groups.
    """
    ranks = ranked(layer, scores)[: width // layer.routing.groups]
    return tuple(sorted(expert for rank in ranks for expert in rank))


def allocate(
    layers: Sequence[RoutedLayer],
    scores: Scores,
    costs: Mapping[int, Sequence[int]],
    capacity: int,
    floors: Mapping[int, int],
) -> Kept:
    """Shares a budget among layers: each time the best expert that is left gets in.

    Args:
        layers: The layers that share the budget.
        scores: What each expert is worth, comparable between layers.
        costs: What each expert takes of the budget.
        capacity: The budget, at least what the floors take.
        floors: The least width of each layer, a multiple of the router's groups.

    Returns:
        The experts that stay. A layer stops growing at the first rank that does not
        fit.
    """
    ranks = {layer.index: ranked(layer, scores[layer.index]) for layer in layers}
    taken = {at.index: floors[at.index] // at.routing.groups for at in layers}

    def cost(index: int, rank: int) -> int:
        return sum(costs[index][expert] for expert in ranks[index][rank])

    def gain(index: int) -> float:
        rank = ranks[index][taken[index]]
        return sum(scores[index][expert] for expert in rank)

    spent = sum(cost(index, rank) for index in taken for rank in range(taken[index]))
    growing = {index for index in taken if taken[index] < len(ranks[index])}
    while growing:
        index = max(sorted(growing), key=gain)
        price = cost(index, taken[index])
        if spent + price > capacity:
            growing.remove(index)
            continue
        spent += price
        taken[index] += 1
        if taken[index] == len(ranks[index]):
            growing.remove(index)
    return {
        layer.index: best(
            layer, scores[layer.index], taken[layer.index] * layer.routing.groups
        )
        for layer in layers
    }
