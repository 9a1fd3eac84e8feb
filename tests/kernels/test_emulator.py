# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The emulator by itself: small kernels that are wrong in one way; its arithmetic."""

import ctypes
from fractions import Fraction

import numpy as np
import pytest

from tests.kernels.emulated.build import Source, library
from tests.kernels.emulated.ops import HERE

SCHEDULES = (0, 1, 2, 3, 4)

#: The case's name in small_kernels.cpp, and the fault that it must end in.
FAULTS = {
    "block of 33 threads": "launch",
    "too much shared memory": "launch",
    "a read past a buffer": "out-of-bounds",
    "a write past shared memory": "out-of-bounds",
    "an odd address": "misaligned",
    "a write to what is only read": "read-only",
    "a read of what nobody wrote": "uninitialized",
    "a read of shared memory that nobody wrote": "uninitialized",
    "two warps, no barrier": "race|uninitialized",
    "two warps, a barrier of each warp": "race|uninitialized",
    "one warp, a shuffle instead of a barrier": "race",
    "two writers, no barrier": "race",
    "a write after a read, no barrier": "race",
    "a race through global memory": "race|uninitialized",
    "two blocks write the same place": "unordered",
    "a block reads what another wrote": "unordered",
    "a copy that nobody waits for": "in-flight",
    "a wait that leaves the copy's group open": "in-flight",
    "a write over a copy under way": "in-flight",
    "another's copy, waited for but no barrier": "race|in-flight|uninitialized",
    "a shuffle by half a warp": "deadlock",
    "lanes in different shuffles": "divergence",
    "a mask of half a warp": "divergence",
    "a barrier after which half the block is gone": "divergence",
    "two barriers in two branches": "divergence",
    "a barrier against a shuffle": "deadlock",
    "frames deeper than the stack": "stack-overflow",
    "a result used before the launch before has ended": "unordered",
    "a wait for a block that needs this one to end": "deadlock",
}
CORRECT = ("the same, waited for", "what a block hands to the last one")


@pytest.fixture(scope="module")
def small() -> ctypes.CDLL:
    return load([])


def load(defines: list[str]) -> ctypes.CDLL:
    build = library("small", [Source(HERE / "small_kernels.cpp")], defines)
    loaded = ctypes.CDLL(str(build))
    loaded.run_small_case.restype = ctypes.c_char_p
    loaded.run_reverse.restype = ctypes.c_char_p
    loaded.small_half_from_double.argtypes = [ctypes.c_double]
    loaded.small_half_from_double.restype = ctypes.c_uint16
    return loaded


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(small: ctypes.CDLL, name: str, schedule: int) -> None:
    """Found under every schedule: no fault hides behind a lucky order."""
    found = small.run_small_case(name.encode(), schedule)
    assert found is not None
    assert found.decode().split(":")[0] in FAULTS[name].split("|"), found.decode()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CORRECT)
def test_correct(small: ctypes.CDLL, name: str, schedule: int) -> None:
    assert small.run_small_case(name.encode(), schedule) is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_example_of_the_page(small: ctypes.CDLL, schedule: int) -> None:
    assert small.run_reverse(schedule) is None


def test_without_the_switch_in_assembly() -> None:
    """As on processors other than x86-64."""
    portable = load(["EMU_UCONTEXT"])
    assert portable.run_reverse(3) is None
    assert portable.run_small_case(b"what a block hands to the last one", 3) is None
    found = portable.run_small_case(b"a write after a read, no barrier", 0)
    assert found.startswith(b"race")


def test_a_fault_names_the_place_block_and_thread(small: ctypes.CDLL) -> None:
    found = small.run_small_case(b"a read past a buffer", 0).decode()
    assert "given byte 1024, which has 1024" in found
    assert "small_kernels.cpp:" in found
    assert "block (0,0,0) thread 31" in found


def test_a_deadlock_says_who_waits_where(small: ctypes.CDLL) -> None:
    found = small.run_small_case(b"a barrier against a shuffle", 0).decode()
    assert "31 lanes in __shfl_xor_sync at small_kernels.cpp:" in found
    assert "1 lanes in __syncthreads at small_kernels.cpp:" in found


@pytest.mark.parametrize(
    "distance, wavefronts", [(1, 1), (2, 2), (3, 1), (8, 8), (32, 32), (33, 1)]
)
def test_bank_conflicts(small: ctypes.CDLL, distance: int, wavefronts: int) -> None:
    assert small.count_wavefronts(distance) == wavefronts


def test_halves_to_float(small: ctypes.CDLL) -> None:
    got = np.empty(65536, np.float32)
    small.small_halves_to_float(ctypes.c_void_p(got.ctypes.data))
    want = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    assert np.array_equal(got, want, equal_nan=True)


def test_halves_from_double(small: ctypes.CDLL) -> None:
    """All halves, all midpoints, and both neighbours of each midpoint."""
    halves = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = (halves[:-1] + halves[1:]) / 2
    values = np.concatenate(
        [halves, middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)]
    )
    values = np.concatenate([values, -values, [1e9, -np.inf, 1e-9]])
    got = np.array([small.small_half_from_double(v) for v in values], np.uint16)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16).view(np.uint16)
    assert np.array_equal(got, want)


def test_fused_multiply_add_rounds_once(small: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (
        rng.integers(0, 65536, 4000).astype(np.uint16).view(np.float16)
        for _ in range(3)
    )
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = (np.ascontiguousarray(v[finite]) for v in (a, b, c))
    got = np.empty_like(a)
    addresses = (ctypes.c_void_p(v.ctypes.data) for v in (a, b, c, got))
    small.small_half_fma(*addresses, len(a))
    for x, y, z, result in zip(a, b, c, got):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if not np.isfinite(result):
            assert abs(exact) >= 65520
            continue
        error = abs(Fraction(float(result)) - exact)
        for neighbour in (
            np.nextafter(result, np.float16(np.inf)),
            np.nextafter(result, np.float16(-np.inf)),
        ):
            if np.isfinite(neighbour):
                assert error <= abs(Fraction(float(neighbour)) - exact)
