# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The CUDA kernels of routed experts, run by the emulator, against float64.

fp16 rounds the activations before each product: 2.1e-4 of sigma each. The first of
these errors reaches both factors of the activation, which makes 3.7e-4 of both. What
is allowed is 6e-4, since few tokens have few errors, and for the worst output 8 times
that.
"""

import numpy as np
import pytest

from tests.kernels.emulated.experts import (
    HIDDEN,
    POOL,
    Experts,
    make_experts,
    reference,
    route,
)
from tests.kernels.emulated.moe import EmulatedMoe
from tests.kernels.emulated.ops import Run
from tests.reference_codec import rotate

SCHEDULES = (0, 1, 3, 6)
RMS = 6e-4


def check(got: np.ndarray, want: np.ndarray) -> None:
    assert np.isfinite(got).all()
    error = np.abs(got - want) / want.std()
    assert np.sqrt(np.mean(error**2)) < RMS
    assert error.max() < 8 * RMS, np.unravel_index(error.argmax(), error.shape)


def run_all_schedules(op: EmulatedMoe, layer: Experts, *inputs, **options):
    results = [
        op(
            *inputs,
            **layer.tensors,
            slices=layer.slices,
            run=Run(schedule=schedule, launches=2),
            **options,
        )
        for schedule in (SCHEDULES if len(layer.dense) < 100 else SCHEDULES[1::2])
    ]
    for result in results[1:]:
        assert np.array_equal(result.view(np.uint32), results[0].view(np.uint32))
    return results[0]


@pytest.mark.parametrize("tokens, block_rows, splits", [
    (1, 16, (1, 1)), (2, 16, (2, 2)), (5, 16, (1, 1)), (8, 16, (4, 1)),
    (9, 32, (1, 2)), (33, 32, (1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("width, top_k", [(1, 1), (5, 2), (28, 8), (56, 8), (256, 8)])
def test_widths_and_batches(
    emulated_moe: EmulatedMoe,
    width: int,
    top_k: int,
    tokens: int,
    block_rows: int,
    splits: tuple[int, int],
) -> None:
    """K 2, 3, 4 and 6 mixed in each layer."""
    rng = np.random.default_rng(width + tokens)
    layer = make_experts(width)
    x = rng.normal(size=(tokens, HIDDEN)).astype(np.float32)
    ids, weights = route(rng, tokens, top_k, width)
    options = {"block_rows": block_rows, "splits": splits}
    got = run_all_schedules(emulated_moe, layer, x, ids, weights, **options)
    check(got, reference(layer, x, ids, weights))


@pytest.mark.parametrize("block_rows", (16, 32, 64))
def test_every_kind_of_tile(emulated_moe: EmulatedMoe, block_rows: int) -> None:
    """Codebooks and rates of all kinds, in one layer."""
    kinds = tuple((words, words // 16 % 3) for words in range(16, 129, 16))
    kinds += ((24, 2), (40, 2), (56, 2))
    rng = np.random.default_rng(block_rows)
    layer = make_experts(POOL, kinds=kinds)
    x = rng.normal(size=(11, HIDDEN)).astype(np.float32)
    ids, weights = route(rng, 11, 8, POOL)
    got = run_all_schedules(emulated_moe, layer, x, ids, weights, block_rows=block_rows)
    check(got, reference(layer, x, ids, weights))


@pytest.mark.parametrize("block_rows", (16, 64))
def test_all_tokens_to_one_expert(emulated_moe: EmulatedMoe, block_rows: int) -> None:
    """Some tiles of one expert, the last ragged; the other experts have none."""
    rng = np.random.default_rng(0)
    layer = make_experts(28)
    x = rng.normal(size=(70, HIDDEN)).astype(np.float32)
    ids = np.full((70, 1), 17, np.int64)
    weights = rng.uniform(size=(70, 1)).astype(np.float32)
    got = run_all_schedules(emulated_moe, layer, x, ids, weights, block_rows=block_rows)
    check(got, reference(layer, x, ids, weights))


def test_experts_elsewhere(emulated_moe: EmulatedMoe) -> None:
    """Ids of experts that are not here, or that are -1, add nothing."""
    rng = np.random.default_rng(1)
    layer = make_experts(5)
    expert_map = np.full(12, -1, np.int32)
    expert_map[[1, 4, 5, 8, 11]] = [3, 0, 2, 4, 1]
    x = rng.normal(size=(9, HIDDEN)).astype(np.float32)
    ids, weights = route(rng, 9, 4, 12)
    ids[3, 2] = -1
    ids[6] = (0, 2, 3, 6)  # a token all of whose experts are elsewhere
    got = run_all_schedules(emulated_moe, layer, x, ids, weights, expert_map=expert_map)
    check(got, reference(layer, x, ids, weights, expert_map))
    assert np.array_equal(got[6], np.zeros(HIDDEN))


def test_nobody_is_here(emulated_moe: EmulatedMoe) -> None:
    layer = make_experts(5)
    x = np.ones((2, HIDDEN), np.float32)
    ids = np.full((2, 2), -1, np.int32)
    got = run_all_schedules(emulated_moe, layer, x, ids, np.ones((2, 2), np.float32))
    assert np.array_equal(got, np.zeros((2, HIDDEN)))


@pytest.mark.parametrize("slices", (2, 4))
def test_slices_are_added_up(emulated_moe: EmulatedMoe, slices: int) -> None:
    rng = np.random.default_rng(slices)
    layer = make_experts(5, slices)
    x = rng.normal(size=(7, HIDDEN)).astype(np.float32)
    ids, weights = route(rng, 7, 3, 5)
    got = run_all_schedules(emulated_moe, layer, x, ids, weights, splits=(2, 1))
    check(got, reference(layer, x, ids, weights))


def test_weights_of_zero_and_a_limit(emulated_moe: EmulatedMoe) -> None:
    rng = np.random.default_rng(2)
    layer = make_experts(5)
    x = rng.normal(size=(6, HIDDEN)).astype(np.float32)
    ids, weights = route(rng, 6, 2, 5)
    weights[:, 0] = 0
    got = run_all_schedules(emulated_moe, layer, x, ids, weights, limit=0.5)
    want = reference(layer, x, ids, weights, limit=0.5)
    check(got, want)
    assert not np.allclose(want, reference(layer, x, ids, weights), rtol=0.1)


def test_hidden_states_narrower_than_stored(emulated_moe: EmulatedMoe) -> None:
    rng = np.random.default_rng(4)
    layer = make_experts(5)
    x = rng.normal(size=(3, 203)).astype(np.float32)
    ids, weights = route(rng, 3, 2, 5)
    got = run_all_schedules(emulated_moe, layer, x, ids, weights)
    check(got, reference(layer, x, ids, weights))


def test_weights_beyond_two_to_the_31_words(emulated_moe: EmulatedMoe) -> None:
    """A layer of 256 experts is that large. What is never read takes no memory here."""
    rng = np.random.default_rng(7)
    layer = make_experts(1)
    tensors = dict(layer.tensors)
    far = 2**31 + 2**20
    tensors["experts"] = tensors["experts"].copy()
    tensors["experts"][:, :, 0] += far
    for name in ("w13", "w2"):
        slab = np.zeros(far + tensors[name].size, np.int16)
        slab[far:] = tensors[name]
        tensors[name] = slab
    x = rng.normal(size=(1, HIDDEN)).astype(np.float32)
    ids, weights = route(rng, 1, 1, 1)
    check(emulated_moe(x, ids, weights, **tensors), reference(layer, x, ids, weights))


def test_a_token_is_the_same_in_every_batch(emulated_moe: EmulatedMoe) -> None:
    """Without splits k is added up in one order, and experts in the router's."""
    rng = np.random.default_rng(6)
    layer = make_experts(28)
    x = rng.normal(size=(33, HIDDEN)).astype(np.float32)
    ids, weights = route(rng, 33, 8, 28)
    alone = emulated_moe(x[20:21], ids[20:21], weights[20:21], **layer.tensors)
    for block_rows in (16, 32, 64):
        among = emulated_moe(x, ids, weights, **layer.tensors, block_rows=block_rows)
        assert np.array_equal(among[20], alone[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_beyond_half_precision_are_counted(
    emulated_moe: EmulatedMoe, schedule: int
) -> None:
    """The input transforms of gate and up, and of down, each clamp and count."""
    rng = np.random.default_rng(21)
    layer = make_experts(5)
    x = rng.normal(size=(6, HIDDEN)).astype(np.float32)
    ids, weights = route(rng, 6, 2, 5)
    ids[1] = -1  # nobody transforms it, so nobody counts it
    run = Run(schedule=schedule, launches=2)

    # Inputs of down are products of two: so they are beyond it first.
    assert 3000 * np.abs(x).max() * np.abs(layer.tensors["suh13"]).max() < 65504 / 12
    beyond = 0
    for token, slot in zip(*np.nonzero(ids >= 0)):
        expert = ids[token, slot]
        gate, up, _ = layer.dense[expert]
        wide = 3000.0 * x[token].astype(np.float64)
        g, u = wide @ gate, wide @ up
        activated = g / (1 + np.exp(-g)) * u * layer.tensors["suh2"][expert]
        beyond += int((np.abs(rotate(activated)) > 65504).sum())
    got = emulated_moe(3000 * x, ids, weights, **layer.tensors, run=run)
    assert np.isfinite(got).all()
    assert beyond > 500
    assert abs(emulated_moe.clamped - 2 * beyond) <= 8  # those close to the limit

    huge = np.zeros_like(x)
    huge[0, 3] = huge[1, 3] = 1e30  # one number becomes 128 in each transform
    got = emulated_moe(huge, ids, weights, **layer.tensors, run=run)
    assert np.isfinite(got).all()
    assert emulated_moe.clamped >= 2 * 2 * 2 * 128  # launches, experts, projections
