# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Registers, shared memory and instructions of the CUDA kernels stay within budgets.

Speed can't be measured without a GPU, but what limits it can be counted in the machine
code. `budgets.toml` has the limits; a test that fails prints what there is.
"""

import os
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.kernels import cubins
from tests.kernels.cubins import ARCHITECTURES, Kernel, ToolMissingError

_HERE = Path(__file__).parent
BUDGETS = tomllib.loads((_HERE / "budgets.toml").read_text())

#: Operations that are no arithmetic of the decoder's: memory, tensor cores, control.
OTHER = frozenset(
    [
        *("LDC", "LDCU", "LDG", "LDS", "LDSM", "STG", "STS", "ULDC"),
        *("HMMA", "IMMA", "CS2R", "S2R", "S2UR"),
        *("BAR", "BRA", "DEPBAR", "EXIT", "NOP", "WARPSYNC"),
    ]
)
THREADS = 256  # of a block
REGISTERS = 65536  # of a multiprocessor
#: Bytes of shared memory and threads of a multiprocessor.
MULTIPROCESSORS = {"90a": (228 * 1024, 2048), "120f": (100 * 1024, 1536)}
SHARED_OVERHEAD = 1024  # bytes that the system takes of each block's
LARGEST_BLOCK = 99 * 1024  # bytes of shared memory, on 8.6, 8.9 and 12.0


def _or_missing(action):
    """What the action gives; without CUDA's tools a failure in CI, else a skip."""
    try:
        return action()
    except ToolMissingError as error:
        message = f"no budget was checked: {error}"
        if os.environ.get("CI"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)


@cache
def kernels(architecture: str) -> list[Kernel]:
    return cubins.compile_all(architecture)


@cache
def shared_bytes() -> dict[tuple[str, tuple[int, ...]], int]:
    """Of each kernel, by its name without an ending and its template's integers."""
    probes = cubins.compile_cubin(_HERE / "shared_bytes.cu", ARCHITECTURES[0]).kernels
    return {
        (probe.name.removesuffix("_probe"), probe.numbers[:-1]): probe.numbers[-1]
        for probe in probes
    }


def table(rows: list[tuple], head: tuple[str, ...]) -> str:
    return "\n".join(
        "  ".join(f"{cell!s:>18}" for cell in row) for row in [head, *rows]
    )


def check(rows: list[tuple], head: tuple[str, ...]) -> None:
    """Fails with the table if a row's last cell says that it is over its budget."""
    text = table(rows, head)
    print(text)
    assert not any(row[-1] for row in rows), f"over budget:\n{text}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture):
    spilled = [k for k in _or_missing(lambda: kernels(architecture)) if k.spilled]
    assert not spilled


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_and_blocks(architecture):
    """The most registers and memory of each kernel, and so the fewest blocks."""
    memory, threads = MULTIPROCESSORS[architecture]
    registers: dict[tuple[str, str], int] = defaultdict(int)
    shared: dict[tuple[str, str], int] = defaultdict(int)
    for kernel in _or_missing(lambda: kernels(architecture)):
        key = kernel.name, _variant(kernel)
        registers[key] = max(registers[key], kernel.registers)
        shared[key] = max(shared[key], _shared_bytes_of(kernel))
    rows = []
    for key in sorted(registers):
        blocks = min(
            REGISTERS // (-(-registers[key] // 8) * 8 * THREADS),
            memory // (shared[key] + SHARED_OVERHEAD),
            threads // THREADS,
        )
        budget = BUDGETS["kernels"].get(key[0], {}).get(key[1], {})
        most, fewest = budget.get(f"sm_{architecture}", (0, threads))
        over = registers[key] > most or blocks < fewest or shared[key] > LARGEST_BLOCK
        rows.append(
            (*key, registers[key], most, shared[key], blocks, fewest, "over" * over)
        )
    head = ("kernel", "variant", "registers", "at most", "shared bytes", "blocks")
    check(rows, (*head, "at least", ""))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_instructions_of_decoding(architecture):
    """Arithmetic instructions a weight: with decoding, less without."""
    source = _HERE / "decode_cost.cu"
    counts = _or_missing(
        lambda: cubins.instructions(cubins.compile_cubin(source, architecture))
    )

    def arithmetic(*numbers: int) -> int:
        return sum(n for name, n in counts[numbers].items() if name not in OTHER)

    def decoding(words: int, decoder: int, tiles: int) -> int:
        return arithmetic(words, decoder, 1, tiles) - arithmetic(
            words, decoder, 0, tiles
        )

    rows = []
    for decoder, name in enumerate(("halves", "bytes", "unrounded", "integers")):
        for words in sorted({key[0] for key in counts if key[1] == decoder}):
            # A lane has 8 weights of a tile.
            added = decoding(words, decoder, 16) - decoding(words, decoder, 8)
            cost = added / (8 * 8)
            budget = BUDGETS["decoding"][name].get(str(words), 0.0)
            rows.append(
                (name, words / 16, f"{cost:.2f}", budget, "over" * (cost > budget))
            )
    check(rows, ("decoder", "bits", "a weight", "budget", ""))


def test_the_count_sees_a_decoder():
    """Without this, a disassembler that lists nothing would be within any budget."""
    counts = _or_missing(
        lambda: cubins.instructions(
            cubins.compile_cubin(_HERE / "decode_cost.cu", ARCHITECTURES[0])
        )
    )
    with_decoding, without = counts[64, 0, 1, 16], counts[64, 0, 0, 16]
    assert with_decoding["HMMA"] == without["HMMA"] == 32
    assert with_decoding["LDS"] == without["LDS"]
    assert with_decoding["PRMT"] > without["PRMT"] + 100
    # One multiplication for each of 16 * 8 weights.
    assert with_decoding["IMAD"] >= 128 > without["IMAD"]


def _variant(kernel: Kernel) -> str:
    """What kernels of one name have budgets for."""
    names = BUDGETS["kernels"].get(kernel.name, {}).get("numbers", [])
    numbers = dict(zip(names, kernel.numbers))
    words = [f"{size} rows" for name, size in numbers.items() if name == "rows"]
    if "words" in numbers:
        words.append("up to 4 bits" if numbers["words"] <= 64 else "up to 8 bits")
    if numbers.get("decoder", 0) >= 2:
        words.append(("unrounded", "integers")[numbers["decoder"] - 2])
    return ", ".join(words) or "all"


def _shared_bytes_of(kernel: Kernel) -> int:
    name = kernel.name.removesuffix("_kernel")
    sizes = [
        size
        for (probe, numbers), size in shared_bytes().items()
        if probe == name and kernel.numbers[: len(numbers)] == numbers
    ]
    assert len(sizes) <= 1, kernel
    return sizes[0] if sizes else 0
