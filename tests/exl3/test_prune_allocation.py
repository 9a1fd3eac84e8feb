# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Which experts a budget leaves, on scores that nobody had to compute."""

import itertools
import random

import pytest

from exl3.checkpoint.routing import Routing
from exl3.tools.prune.allocation import allocate, best
from exl3.tools.prune.budget import Budget, parse_size
from exl3.tools.prune.layers import RoutedLayer, Source
from exl3.tools.shared.errors import ToolError


def layer(index=1, width=8, top_k=2, groups=1, top_groups=1, sizes=None):
    return RoutedLayer(
        index=index,
        name=f"model.layers.{index}.mlp",
        width=width,
        is_draft=False,
        routing=Routing(top_k, groups, top_groups, biased=True),
        expert_bytes=tuple(sizes or [100] * width),
    )


def scores_of(layers, seed):
    draw = random.Random(seed)
    return {at.index: [draw.random() for _ in range(at.width)] for at in layers}


def ones(layers):
    return {at.index: [1] * at.width for at in layers}


def test_the_best_experts_stay_in_their_order():
    assert best(layer(width=5), [0.1, 0.9, 0.3, 0.8, 0.2], 3) == (1, 2, 3)
    assert best(layer(width=5), [0.0] * 5, 2) == (0, 1)


def test_groups_keep_their_members():
    grouped = layer(width=12, groups=3, top_groups=2)
    scores = [9, 8, 7, 6, 1, 2, 3, 4, 0, 0, 5, 0]
    kept = best(grouped, scores, 6)
    assert kept == (0, 1, 6, 7, 8, 10)
    # By position, expert i of those that stay is of group i // 2: the one it was in.
    assert [at // 4 for at in kept] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_worth_more(seed):
    layers = [layer(1, 4), layer(2, 6), layer(3, 5)]
    scores = scores_of(layers, seed)
    capacity = random.Random(seed).randint(6, 15)
    floors = {1: 2, 2: 2, 3: 1}
    kept = allocate(layers, scores, ones(layers), capacity, floors)

    def worth(widths):
        top = (sorted(scores[at.index], reverse=True) for at in layers)
        return sum(sum(of[:width]) for of, width in zip(top, widths))

    every = itertools.product(*(range(floors[at.index], at.width + 1) for at in layers))
    expected = max(worth(widths) for widths in every if sum(widths) <= capacity)
    found = sum(scores[index][at] for index, of in kept.items() for at in of)
    assert found == pytest.approx(expected)
    assert sum(map(len, kept.values())) == capacity
    for at in layers:
        assert floors[at.index] <= len(kept[at.index]) <= at.width
        assert kept[at.index] == best(at, scores[at.index], len(kept[at.index]))


@pytest.mark.parametrize("seed", range(10))
def test_experts_of_many_sizes_stay_within_the_budget(seed):
    draw = random.Random(seed)
    layers = [
        layer(index, 8, groups=2, sizes=[draw.randint(50, 150) for _ in range(8)])
        for index in range(4)
    ]
    costs = {at.index: at.expert_bytes for at in layers}
    scores = scores_of(layers, seed)
    kept = allocate(layers, scores, costs, 2200, dict.fromkeys(range(4), 4))
    spent = sum(costs[index][at] for index, of in kept.items() for at in of)
    assert spent <= 2200
    for at in layers:
        assert len(kept[at.index]) in (4, 6, 8)
        if len(kept[at.index]) < 8:  # what comes next would be too much
            wider = best(at, scores[at.index], len(kept[at.index]) + 2)
            more = sum(costs[at.index][expert] for expert in wider)
            less = sum(costs[at.index][expert] for expert in kept[at.index])
            assert spent + more - less > 2200


def source_of(layers, rest=1000):
    """A checkpoint of these layers, with so many bytes beside their experts."""

    class _Source(Source):
        def num_bytes(self, kept):
            sizes = [(at, kept.get(at.index, range(at.width))) for at in layers]
            return rest + sum(at.expert_bytes[e] for at, of in sizes for e in of)

    by_index = {at.index: at for at in layers}
    return _Source(None, {}, (), {}, by_index, len(layers), False)


def widths_by(budget, layers, seed=0, rest=None):
    kept = budget.share(source_of(layers), layers, scores_of(layers, seed), rest or {})
    return [len(kept[at.index]) for at in layers]


def test_a_ratio_is_of_all_layers_together():
    layers = [layer(index, 16) for index in range(1, 6)]
    widths = widths_by(Budget("--keep-ratio", keep_ratio=0.6), layers)
    assert sum(widths) == 48
    assert len(set(widths)) > 1
    assert min(widths) >= 4  # half of the mean, 9.6, in whole experts
    assert widths_by(Budget("--keep-ratio", keep_ratio=1.0), layers) == [16] * 5


def test_a_size_is_of_the_whole_checkpoint():
    layers = [layer(index, 8) for index in range(1, 4)]
    assert sum(widths_by(Budget("--target-size", target_bytes=2299), layers)) == 12
    assert sum(widths_by(Budget("--target-size", target_bytes=2300), layers)) == 13


def test_a_floor_holds_where_scores_would_not():
    layers = [layer(1, 8), layer(2, 8)]
    scores = {1: [10.0] * 8, 2: [1.0] * 8}

    def widths(floor):
        budget = Budget("--keep-ratio", keep_ratio=0.625, floor=floor)
        kept = budget.share(source_of(layers), layers, scores, {})
        return [len(of) for of in kept.values()]

    assert widths(None) == [8, 2]
    assert widths(1) == [8, 2]  # the router needs two
    assert widths(4) == [6, 4]
    assert widths(5) == [5, 5]


@pytest.mark.parametrize(
    ("groups", "top_groups", "top_k", "least"),
    [(1, 1, 3, 3), (4, 2, 2, 8), (4, 2, 6, 12), (8, 4, 8, 16), (2, 1, 1, 4)],
)
def test_widths_leave_grouped_routers_their_choice(groups, top_groups, top_k, least):
    layers = [layer(1, 32, top_k, groups, top_groups)]
    ratio = least / 32
    assert widths_by(Budget("--keep-ratio", keep_ratio=ratio), layers) == [least]
    with pytest.raises(ToolError, match=f"give at least {ratio:.10g}"):
        widths_by(Budget("--keep-ratio", keep_ratio=(least - 1) / 32), layers)
    with pytest.raises(ToolError, match=f"a width of {least - 1};.* at least {least}"):
        widths_by(Budget("--widths", widths=(least - 1,)), layers)
    for width in range(least, 33):
        legal = width % groups == 0
        try:
            assert widths_by(Budget("--widths", widths=(width,)), layers) == [width]
            assert legal
        except ToolError as error:
            assert not legal and f"in multiples of {groups}" in str(error)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"widths": (8, 4)}, "has 2 widths, and 3 layers .*[1, 2, 3]"),
        ({"widths": (9,)}, "layer 1 a width of 9; it has 8 routed experts"),
        ({"keep_ratio": 0.2}, "leaves 5 experts, and the routers need 6"),
        ({"keep_ratio": 0.5, "floor": 5}, "--floor 5 keeps 15 .*or a lower floor"),
        ({"target_bytes": 900}, "leaves 0 bytes of experts, .* give at least 1600$"),
    ],
)
def test_what_cannot_be_kept_is_refused(budget, message):
    layers = [layer(index, 8) for index in range(1, 4)]
    with pytest.raises(ToolError, match=f"^--option: .*{message}"):
        widths_by(Budget("--option", **budget), layers)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1500000000", 1_500_000_000),
        ("1.5GB", 1_500_000_000),
        ("800MB", 800_000_000),
        ("800 MB", 800_000_000),
        ("12GiB", 12 * 2**30),
        ("12G", 12 * 10**9),
        ("0.5TiB", 2**39),
        ("64KiB", 65536),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "1.5.2GB", "-1GB", "1e9", "12iB", "5XB", "1.GB", "nan", "9" * 99]
)
def test_no_sizes(text):
    with pytest.raises(ValueError, match=r"is no size; expected one like 1\.5GB"):
        parse_size(text)
