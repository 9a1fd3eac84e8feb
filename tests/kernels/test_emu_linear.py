# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The dense CUDA kernels, run by the emulator, against float64.

Activations are rounded to fp16 once, which alone gives an error of 2.1e-4 of the
output's standard deviation, whatever k is. What is allowed is 3e-4, and for the worst
of some thousand outputs 8 times that.
"""

import numpy as np
import pytest

from tests.kernels.emulated.build import BLOCK_ROWS
from tests.kernels.emulated.matrices import KINDS, Matrix, make_matrix
from tests.kernels.emulated.ops import EmulatedOps, EmulatorFault, Run, Shard
from tests.reference_codec import (
    CODEBOOKS,
    MARKERS,
    dense_weight,
    inner_matrix,
    rotate,
    unrounded_values,
)

#: Two fair orders of threads, two in which one warp runs ahead.
SCHEDULES = (0, 1, 2, 7)
RMS = 3e-4


def check(got: np.ndarray, want: np.ndarray, rounding: float = 0.0) -> None:
    """`rounding`: the relative error of the output's own type."""
    assert np.isfinite(got).all()
    sigma = want.std()
    error = np.abs(got.astype(np.float64) - want) - rounding * np.abs(want)
    error = np.maximum(error, 0) / sigma
    assert np.sqrt(np.mean(error**2)) < RMS
    assert error.max() < 8 * RMS, np.unravel_index(error.argmax(), error.shape)


def one_shard(matrix: Matrix) -> dict:
    n = matrix.dense.shape[1]
    return {
        "trellis": matrix.trellis.reshape(-1),
        "suh": matrix.suh[None],
        "svh": matrix.svh,
        "bias": None,
        "shards": [Shard(n, 0, n, matrix.words, matrix.codebook)],
    }


def row_counts(block_rows: int, case: int) -> int:
    """One row, not quite a block, a whole one, and a second one begun, in turn."""
    return (1, block_rows - 3, block_rows, block_rows + 2)[case % 4]


@pytest.mark.parametrize("block_rows", BLOCK_ROWS)
@pytest.mark.parametrize("words, codebook", KINDS)
def test_every_kernel(
    emulated: EmulatedOps, words: int, codebook: int, block_rows: int
) -> None:
    """Every schedule gives the same bits, twice on one workspace."""
    case = KINDS.index((words, codebook)) + BLOCK_ROWS.index(block_rows)
    rng = np.random.default_rng(case)
    # Six stages of k: more than the pipeline holds. With 4 splits, uneven parts.
    matrix = make_matrix(rng, 384, 128, words, codebook)
    rows = row_counts(block_rows, case)
    x = rng.normal(size=(rows, 384)).astype(np.float32)
    want = x.astype(np.float64) @ matrix.dense
    for splits in (1, 2, 4):
        results = [
            emulated.linear(
                x,
                **one_shard(matrix),
                block_rows=block_rows,
                splits=splits,
                run=Run(schedule=schedule, launches=2),
            )
            for schedule in SCHEDULES
        ]
        check(results[0], want)
        for result in results[1:]:
            assert np.array_equal(result.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize(
    "words, codebook", [kind for kind in KINDS if kind[1] != CODEBOOKS.index("mul1")]
)
def test_unrounded_weights(emulated: EmulatedOps, words: int, codebook: int) -> None:
    """The tensor core adds a weight's halves, which the format rounds to fp16.

    That rounding is 2.3e-4 of a weight, for weights of the codebook's distribution, and
    so of the output. Against weights that nobody has rounded the error is that of the
    exact kernels.
    """
    rng = np.random.default_rng(words + codebook)
    matrix = make_matrix(rng, 384, 256, words, codebook)
    name = CODEBOOKS[codebook]
    stored = np.ascontiguousarray(matrix.trellis.transpose(1, 0, 2))
    dense = dense_weight(stored, matrix.suh, matrix.svh, name, unrounded_values(name))
    for rows, splits in ((1, 1), (13, 4), (33, 2)):
        x = rng.normal(size=(rows, 384)).astype(np.float32)
        results = [
            emulated.linear(
                x,
                **one_shard(matrix),
                splits=splits,
                unrounded=True,
                run=Run(schedule=schedule, launches=2),
            )
            for schedule in SCHEDULES
        ]
        check(results[0], x.astype(np.float64) @ dense)
        for result in results[1:]:
            assert np.array_equal(result.view(np.uint32), results[0].view(np.uint32))
        exact = emulated.linear(x, **one_shard(matrix), splits=splits)
        difference = np.sqrt(np.mean((results[0] - exact) ** 2)) / exact.std()
        assert 1.5e-4 < difference < 3e-4  # of few samples


@pytest.mark.parametrize("words", [words for words, book in KINDS if book == 2])
def test_integers(emulated: EmulatedOps, words: int) -> None:
    """The tensor core adds mul1's bytes, times activations of 16 bits.

    Against weights that nobody has rounded the activations alone are wrong, by a half
    of 2^-15 of a row's largest: 2e-5 where that is 4 sigma. The format's rounding of
    weights is 2.1e-4.
    """
    rng = np.random.default_rng(words)
    matrix = make_matrix(rng, 384, 256, words, 2)
    stored = np.ascontiguousarray(matrix.trellis.transpose(1, 0, 2))
    values = unrounded_sums()
    dense = dense_weight(stored, matrix.suh, matrix.svh, "mul1", values)
    for rows, width, splits in ((1, 384, 1), (13, 300, 4), (33, 384, 2)):
        x = rng.normal(size=(rows, width)).astype(np.float32)
        results = [
            emulated.linear(
                x,
                **one_shard(matrix),
                splits=splits,
                unrounded=True,
                run=Run(schedule=schedule, launches=2),
            )
            for schedule in SCHEDULES
        ]
        for result in results[1:]:
            assert np.array_equal(result.view(np.uint32), results[0].view(np.uint32))
        want = x.astype(np.float64) @ dense[:width]
        assert np.sqrt(np.mean((results[0] - want) ** 2)) < 5e-5 * want.std()
        check(results[0], x.astype(np.float64) @ matrix.dense[:width])


def test_integers_of_unusual_rows(emulated: EmulatedOps) -> None:
    """Rows have scales of their own: of zeros, beyond fp16, with a NaN."""
    rng = np.random.default_rng(15)
    matrix = make_matrix(rng, 1024, 128, 64, 2)
    x = rng.normal(size=(5, 1024)).astype(np.float32)
    x[1] = 0
    x[2] *= 1e30
    x[3, 700] = np.nan
    x[4] *= 1e-20
    got = emulated.linear(x, **one_shard(matrix), unrounded=True, splits=3)
    want = x.astype(np.float64) @ matrix.dense
    assert (got[1] == 0).all() and np.isnan(got[3]).all()
    for row in (0, 2, 4):
        error = np.sqrt(np.mean((got[row] - want[row]) ** 2)) / want[row].std()
        assert error < 3e-4, row
    assert emulated.clamped == 0


def test_the_largest_integers_do_not_overflow(emulated: EmulatedOps) -> None:
    """Activations of one size and sign, and all of k that a block may add up."""
    matrix = make_matrix(np.random.default_rng(16), 16384, 128, 16, 2)
    # An impulse in each block of 128 becomes 128 equal values.
    x = np.zeros((1, 16384), np.float32)
    x[0, ::128] = 1
    arguments = one_shard(matrix) | {"suh": np.ones((1, 16384), np.float16)}
    got = emulated.linear(x, **arguments, unrounded=True)
    stored = np.ascontiguousarray(matrix.trellis.transpose(1, 0, 2))
    dense = dense_weight(
        stored, arguments["suh"][0], matrix.svh, "mul1", unrounded_sums()
    )
    want = x.astype(np.float64) @ dense
    assert np.sqrt(np.mean((got - want) ** 2)) < 5e-5 * want.std()


def unrounded_sums() -> np.ndarray:
    """mul1's values before the format rounds them, float64 [65536]."""
    product = np.arange(65536, dtype=np.uint64) * MARKERS["mul1"] % 2**32
    total = sum(product >> shift & 0xFF for shift in (0, 8, 16, 24))
    return (1774.0 * (total + 1024.0) - 1329.0 * 2**11) / 2**18


def test_unrounded_weights_of_fused_shards(emulated: EmulatedOps) -> None:
    """Shards of two codebooks that both have halves; the widest row is not aligned."""
    rng = np.random.default_rng(13)
    kinds = [(48, 1), (64, 0), (48, 1)]
    matrices = [make_matrix(rng, 256, 128, *kind) for kind in kinds]
    x = rng.normal(size=(5, 250)).astype(np.float32)
    got = emulated.linear(
        x,
        np.concatenate([m.trellis.reshape(-1) for m in matrices]),
        np.stack([m.suh for m in matrices]),
        np.concatenate([m.svh for m in matrices]),
        None,
        [Shard(128, 3, 120, *kind) for kind in kinds],
        unrounded=True,
    )
    want = [x.astype(np.float64) @ m.dense[:250, 3:123] for m in matrices]
    error = np.sqrt(np.mean((got - np.concatenate(want, axis=1)) ** 2))
    assert error < 4e-4 * np.std(want)


@pytest.mark.parametrize("codebook", (1, 2))
def test_large_blocks_have_no_unrounded_weights(
    emulated: EmulatedOps, codebook: int
) -> None:
    matrix = make_matrix(np.random.default_rng(14), 128, 128, 48, codebook)
    x = np.ones((1, 128), np.float32)
    with pytest.raises(EmulatorFault, match="32 rows with unrounded weights"):
        emulated.linear(x, **one_shard(matrix), unrounded=True, block_rows=32)


@pytest.mark.parametrize("words, codebook", KINDS)
def test_dequantized_bits(emulated: EmulatedOps, words: int, codebook: int) -> None:
    """The inner matrix is the format's, bit for bit."""
    rng = np.random.default_rng(words + codebook)
    matrix = make_matrix(rng, 128, 256, words, codebook)
    got = emulated.dequantize(matrix.trellis, None, None, codebook)
    stored = np.ascontiguousarray(matrix.trellis.transpose(1, 0, 2))
    want = inner_matrix(stored, CODEBOOKS[codebook]).astype(np.float32)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dequantized_with_both_transforms(emulated: EmulatedOps, schedule: int) -> None:
    matrix = make_matrix(np.random.default_rng(5), 256, 128, 48, 1)
    got = emulated.dequantize(
        matrix.trellis, matrix.suh, matrix.svh, 1, Run(schedule=schedule)
    )
    # float32 butterflies of 7 stages, twice.
    assert np.abs(got - matrix.dense).max() < 14 * 2**-24 * np.abs(matrix.dense).max()


def test_every_state_of_every_codebook(emulated: EmulatedOps) -> None:
    """K 8 windows overlap by a byte, so two passes of bytes show all 65,536 states."""
    high, low = np.divmod(np.arange(65536), 256)
    ring = np.stack([high, low], -1).reshape(-1)  # states at odd places
    for codebook in range(3):
        tiles = ring.reshape(-1, 256).astype(np.uint32)
        # Weight t of a K 8 tile owns byte t; words hold bytes most significant first,
        # and the words of a pair are swapped.
        words = (tiles[:, 0::2] << 8 | tiles[:, 1::2]).astype(np.uint16)
        words = words[:, np.arange(128) ^ 1].view(np.int16)
        # 512 tiles: 8 strips of 64.
        trellis = np.ascontiguousarray(words.reshape(8, 64, 128))
        got = emulated.dequantize(trellis, None, None, codebook)
        stored = np.ascontiguousarray(trellis.transpose(1, 0, 2))
        want = inner_matrix(stored, CODEBOOKS[codebook]).astype(np.float32)
        assert np.array_equal(got, want)


@pytest.mark.parametrize(
    "dtype, element", [("float16", np.float16), ("bfloat16", None)]
)
def test_sixteen_bit_activations_with_bias(
    emulated: EmulatedOps, dtype: str, element: type | None
) -> None:
    rng = np.random.default_rng(11)
    matrix = make_matrix(rng, 256, 256, 64, 1)
    x = rng.normal(size=(5, 256)).astype(np.float32)
    bias = rng.normal(size=256).astype(np.float32)

    def narrow(values: np.ndarray) -> np.ndarray:
        if element is not None:
            return values.astype(element).view(np.uint16)
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    def widen(bits: np.ndarray) -> np.ndarray:
        if element is not None:
            return bits.view(element).astype(np.float64)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    arguments = one_shard(matrix)
    arguments["bias"] = narrow(bias)
    stored = narrow(x)
    if element is not None:
        stored = stored.view(element)
        arguments["bias"] = arguments["bias"].view(element)
    got = emulated.linear(stored, **arguments, dtype=dtype)
    want = widen(narrow(x)) @ matrix.dense + widen(narrow(bias))
    check(widen(got.view(np.uint16)), want, 2**-11 if element is not None else 2**-8)


def fused(rng: np.random.Generator, k: int) -> tuple[dict, np.ndarray]:
    """Three shards of different kinds; of each, columns are dropped at an end."""
    kinds = [(256, 0, 256, 48, 1), (128, 0, 100, 64, 1), (128, 27, 64, 48, 1)]
    matrices = [make_matrix(rng, k, n, w, c) for n, _, _, w, c in kinds]
    dense = [
        m.dense[:, skip : skip + keep]
        for m, (_, skip, keep, *_) in zip(matrices, kinds)
    ]
    arguments = {
        "trellis": np.concatenate([m.trellis.reshape(-1) for m in matrices]),
        "suh": np.stack([m.suh for m in matrices]),
        "svh": np.concatenate([m.svh for m in matrices]),
        "bias": rng.normal(size=420).astype(np.float32),
        "shards": [Shard(*kind) for kind in kinds],
    }
    return arguments, np.concatenate(dense, axis=1)


@pytest.mark.parametrize("splits", (1, 3))
def test_fused_shards_of_different_rates(emulated: EmulatedOps, splits: int) -> None:
    """Two of three shards share a launch; kept columns begin and end anywhere."""
    rng = np.random.default_rng(3)
    arguments, dense = fused(rng, 384)
    x = rng.normal(size=(19, 384)).astype(np.float32)
    run = Run(schedule=5, launches=2)
    got = emulated.linear(x, **arguments, block_rows=32, splits=splits, run=run)
    check(got, x.astype(np.float64) @ dense + arguments["bias"])


@pytest.mark.parametrize("width", (1, 127, 130, 255))
def test_inputs_narrower_than_stored(emulated: EmulatedOps, width: int) -> None:
    """The rest of a row counts as zeros, whatever lies behind it."""
    rng = np.random.default_rng(width)
    matrix = make_matrix(rng, 256, 128, 40, 2)
    x = rng.normal(size=(3, width)).astype(np.float32)
    got = emulated.linear(x, **one_shard(matrix))
    check(got, x.astype(np.float64) @ matrix.dense[:width])


def test_a_row_is_the_same_in_every_batch(emulated: EmulatedOps) -> None:
    """Without splits k is added up in one order, whatever the block's rows."""
    rng = np.random.default_rng(8)
    matrix = make_matrix(rng, 384, 128, 56, 2)
    x = rng.normal(size=(70, 384)).astype(np.float32)
    alone = emulated.linear(x[41:42], **one_shard(matrix), block_rows=16)
    for block_rows in BLOCK_ROWS:
        among = emulated.linear(x, **one_shard(matrix), block_rows=block_rows)
        assert np.array_equal(among[41], alone[0])


@pytest.mark.parametrize("unrounded", (False, True))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_beyond_half_precision_are_clamped(
    emulated: EmulatedOps, schedule: int, unrounded: bool
) -> None:
    """bfloat16 inputs may be: then results are finite, and the values are counted."""
    rng = np.random.default_rng(9)
    matrix = make_matrix(rng, 384, 256, 48, 1)
    x = rng.normal(size=(3, 384)).astype(np.float32)
    x[0, :256] *= 1e30
    x[2, 130] = 1e38
    stored = (x.view(np.uint32) >> 16).astype(np.uint16)
    wide = (stored.astype(np.uint32) << 16).view(np.float32)
    transformed = rotate(wide.astype(np.float64) * matrix.suh)
    beyond = int((np.abs(transformed) > 65504).sum())
    assert 300 < beyond < 400
    for launches in (1, 2):
        got = emulated.linear(
            stored,
            **one_shard(matrix),
            dtype="bfloat16",
            splits=2,
            unrounded=unrounded,
            run=Run(schedule=schedule, launches=launches),
        )
        finite = (got.astype(np.uint32) << 16).view(np.float32)
        assert np.isfinite(finite).all()
        assert emulated.clamped == launches * beyond


def test_nothing_is_clamped_in_range(emulated: EmulatedOps) -> None:
    """60,000 is in fp16's range, and NaN is not beyond it."""
    matrix = make_matrix(np.random.default_rng(10), 128, 128, 48, 1)
    suh = np.ones_like(matrix.suh)
    impulse = np.zeros((2, 128), np.float32)
    impulse[0, 5] = 60000 * np.sqrt(128)  # all 128 values become +- 60000
    impulse[1, 7] = np.nan
    arguments = one_shard(matrix) | {"suh": suh[None]}
    got = emulated.linear(impulse, **arguments)
    assert np.isfinite(got[0]).all() and np.isnan(got[1]).all()
    assert emulated.clamped == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hadamard(emulated: EmulatedOps, schedule: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 384)).astype(np.float32)
    pre, post = (rng.normal(size=384).astype(np.float16) for _ in range(2))
    run = Run(schedule=schedule)
    want = rotate(x.astype(np.float64) * pre) * post
    got = emulated.hadamard(x, pre, post, run=run)
    assert np.abs(got - want).max() < 10 * 2**-24 * np.abs(want).max()
    plain = emulated.hadamard(x, None, None, run=run)
    assert np.abs(plain - rotate(x.astype(np.float64))).max() < 10 * 2**-22


def test_more_row_blocks_than_share_a_strip(emulated: EmulatedOps) -> None:
    """Tiles are walked in groups of eight row blocks; the last group is ragged."""
    rng = np.random.default_rng(2)
    matrix = make_matrix(rng, 128, 384, 16, 0)
    x = rng.normal(size=(16 * 10 + 1, 128)).astype(np.float32)
    got = emulated.linear(x, **one_shard(matrix), run=Run(resident_blocks=3))
    check(got, x.astype(np.float64) @ matrix.dense)


def test_no_bank_conflicts_in_the_main_loop(emulated: EmulatedOps) -> None:
    """At K 4 a lane reads words of its own; at K 3 lanes share them."""
    rng = np.random.default_rng(4)
    for words in (48, 64):
        matrix = make_matrix(rng, 256, 128, words, 1)
        x = rng.normal(size=(16, 256)).astype(np.float32)
        emulated.linear(x, **one_shard(matrix), run=Run(count_banks=True))
        lines = [line.split() for line in emulated.banks().splitlines()]
        assert {line[1] for line in lines} == {"cp.async", "ldmatrix", "load", "store"}
        for place, kind, instructions, _, conflicts in lines:
            assert int(instructions) > 0
            assert int(conflicts) == 0, f"{place} {kind}"
