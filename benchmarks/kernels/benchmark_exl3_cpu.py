# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Speed of the CPU kernels beside torch's dense linear layers.

    python benchmarks/kernels/benchmark_exl3_cpu.py --json exl3_cpu.json

One thread, and its CPU time: on an idle machine that is the time on the clock, on a
busy one it leaves out what others take. Every column of a line takes its turn in each
repeat, so that a change of the machine's speed meets all of them; each reads its
weights from a rotation of at least 200 MB. torch appears twice: with all that the
machine has (bf16 may then use AMX), and, in a second process that runs by turns with
the first, limited to AVX2. Ratios are torch's time over ours: above 1 we are faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from exl3 import ops

#: What each tier of the kernels is called by EXL3_CPU_ISA.
TIERS = ("portable", "avx2", "avx512", "avx512fp16", "amx")
#: More would take the portable tier a second, where the others take milliseconds.
PORTABLE_ROWS = 1
#: And it takes its turn this seldom.
PORTABLE_STRIDE = 10
CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}
AVX2_ONLY = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


@dataclass(frozen=True)
class Case:
    """A layer to measure."""

    name: str
    rows: int
    in_features: int
    out_features: int
    bits: float = 4
    codebook: str = "mcg"
    #: Experts of a layer and of a token; 0 for a linear layer.
    experts: int = 0
    top_k: int = 0


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one column."""

    median: float
    least: float


class Rotation:
    """Weights that are too many for the caches, one set after another."""

    def __init__(self, make: Callable[[], list[torch.Tensor]], megabytes: int) -> None:
        """Makes sets until they have so many megabytes; at least two."""
        self.sets = [make()]
        size = sum(tensor.nbytes for tensor in self.sets[0])
        while len(self.sets) < 2 or len(self.sets) * size < megabytes * 1e6:
            self.sets.append(make())
        self.next = 0

    def __call__(self) -> list[torch.Tensor]:
        """The set whose turn it is."""
        self.next = (self.next + 1) % len(self.sets)
        return self.sets[self.next]


def random_words(count: int) -> torch.Tensor:
    """int16 `[count]`; any words are valid tiles."""
    return torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16)


def scales(*shape: int) -> torch.Tensor:
    """float16 scales of plausible size."""
    return (torch.rand(shape) + 0.5).half() / 8


def exl3_column(case: Case, tier: str, megabytes: int) -> Callable[[], object]:
    """A call of our op, under one tier."""
    k, n, words = case.in_features, case.out_features, int(16 * case.bits)
    codebook = CODEBOOKS[case.codebook]
    size = k * n // 256 * words
    x = torch.randn(case.rows, k, dtype=torch.bfloat16)
    call: Callable[[], object]
    if case.experts:
        rotation = Rotation(
            lambda: [
                random_words(2 * case.experts * size),
                random_words(case.experts * size),
            ],
            megabytes,
        )
        table = torch.tensor(
            [
                [[at * size, words, codebook] for at in (2 * e, 2 * e + 1, e)]
                for e in range(case.experts)
            ]
        )
        vectors = (
            scales(case.experts, 2, k),
            scales(case.experts, 2, n),
            scales(case.experts, n),
            scales(case.experts, k),
        )
        routes = torch.rand(case.rows, case.experts).topk(case.top_k)

        def call() -> object:
            w13, w2 = rotation()
            return ops.moe(
                x, routes.indices, routes.values, w13, w2, table, *vectors, slices=1
            )

    else:
        rotation = Rotation(lambda: [random_words(size)], megabytes)
        suh, svh = scales(1, k), scales(n)

        def call() -> object:
            return ops.linear(
                x, rotation()[0], suh, svh, None, [n, 0, n, words, codebook]
            )

    def under_tier() -> object:
        os.environ["EXL3_CPU_ISA"] = tier
        return call()

    return under_tier


def torch_column(
    case: Case, dtype: torch.dtype, megabytes: int
) -> Callable[[], object]:
    """A call of torch's linear layer, or of one for each expert with its tokens."""
    k, n = case.in_features, case.out_features
    x = torch.randn(case.rows, k, dtype=dtype)
    linear = torch.nn.functional.linear
    if not case.experts:
        rotation = Rotation(lambda: [torch.randn(n, k).to(dtype)], megabytes)
        return lambda: linear(x, rotation()[0])
    rotation = Rotation(
        lambda: [
            torch.randn(case.experts, 2 * n, k).to(dtype),
            torch.randn(case.experts, k, n).to(dtype),
        ],
        megabytes,
    )
    routes = torch.rand(case.rows, case.experts).topk(case.top_k)
    chosen = [(routes.indices == e).nonzero()[:, 0] for e in range(case.experts)]

    def call() -> object:
        w13, w2 = rotation()
        out = torch.zeros_like(x)
        for expert, tokens in enumerate(chosen):
            if tokens.numel():
                gate, up = linear(x[tokens], w13[expert]).chunk(2, dim=-1)
                hidden = torch.nn.functional.silu(gate) * up
                out.index_add_(0, tokens, linear(hidden, w2[expert]))
        return out

    return call


def torch_columns(case: Case, megabytes: int) -> dict[str, Callable[[], object]]:
    """The columns of torch, under whatever limit this process has."""
    return {
        "torch bf16": torch_column(case, torch.bfloat16, megabytes),
        "torch f32": torch_column(case, torch.float32, megabytes),
    }


class LimitedTorch:
    """torch limited to AVX2, in a process of its own, which waits until it is asked."""

    def __init__(self) -> None:
        """Starts the process."""
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve-limited"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **AVX2_ONLY},
            text=True,
        )

    def ask(self, question: object) -> float:
        """Sends one line; returns the seconds that the answer holds."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=60)


def serve_limited() -> None:
    """Answers `LimitedTorch`: a case is prepared, a column's name is run once."""
    columns: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if isinstance(question, dict):
            megabytes = question.pop("megabytes")
            columns.clear()
            columns.update(torch_columns(Case(**question), megabytes))
            print(0.0, flush=True)
        else:
            print(seconds_of(columns[question]), flush=True)


def seconds_of(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(
    case: Case,
    tiers: Sequence[str],
    limited: LimitedTorch,
    repeats: int,
    megabytes: int,
) -> dict[str, Timing]:
    """Times every column of a case, by turns."""
    ours = {
        f"exl3 {tier}": exl3_column(case, tier, megabytes)
        for tier in tiers
        if tier != "portable" or case.rows <= PORTABLE_ROWS
    }
    calls = {**ours, **torch_columns(case, megabytes)}
    limited.ask({**asdict(case), "megabytes": megabytes})
    columns: dict[str, Callable[[], float]] = {
        name: partial(seconds_of, call) for name, call in calls.items()
    }
    for name in ("torch bf16", "torch f32"):
        columns[f"{name} avx2"] = partial(limited.ask, name)
    times: dict[str, list[float]] = {name: [] for name in columns}
    for repeat in range(repeats + 1):
        for name, run in columns.items():
            if name == "exl3 portable" and repeat % PORTABLE_STRIDE:
                continue
            seconds = run()
            if repeat:  # the first one warms up
                times[name].append(1e3 * seconds)
    return {
        name: Timing(statistics.median(all_), min(all_)) for name, all_ in times.items()
    }


def cases(rows: Sequence[int]) -> list[Case]:
    """The table: rates and codebooks, then rows, then narrow shards and experts."""
    square = (4096, 4096)
    listed = [
        Case(f"{codebook} {bits} bits", 1, *square, bits, codebook)
        for codebook, bits in (
            ("mcg", 2),
            ("mcg", 3),
            ("mcg", 6),
            ("3inst", 4),
            ("mul1", 2.5),
            ("mul1", 3),
        )
    ]
    listed += [
        Case(f"{codebook} 4 bits", count, *square, 4, codebook)
        for codebook in ("mcg", "mul1")
        for count in rows
    ]
    listed += [
        Case("mcg 4 bits, 128 wide", count, 4096, 128)
        for count in (1, 8)
        if count in rows
    ]
    listed += [
        Case("moe 32 x 512, top 8", count, 2048, 512, 3, "mcg", experts=32, top_k=8)
        for count in (1, 8, 64)
        if count in rows
    ]
    return listed


def describe(case: Case, timings: dict[str, Timing]) -> str:
    """One line of the table: least milliseconds, and median ratios to each torch."""
    best = next(t for name, t in reversed(timings.items()) if name.startswith("exl3"))
    cells = [f"{case.name:24}{case.rows:5}"]
    cells += [
        f"{timings[name].least:13.2f}" if name in timings else " " * 12 + "-"
        for name in COLUMNS
    ]
    for name in COLUMNS[len(TIERS) :]:
        against = timings["exl3 avx2"] if name.endswith("avx2") else best
        cells.append(f"{timings[name].median / against.median:12.2f}x")
    return "".join(cells)


TORCH = ("torch bf16", "torch f32", "torch bf16 avx2", "torch f32 avx2")
COLUMNS = [*(f"exl3 {tier}" for tier in TIERS), *TORCH]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="1,2,4,8,16,64,128,256")
    parser.add_argument("--repeats", type=int, default=40, help="of up to 8 rows")
    parser.add_argument("--megabytes", type=int, default=200, help="of each rotation")
    parser.add_argument("--tiers", default=",".join(TIERS))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--json", type=Path, help="also write all timings there")
    parser.add_argument("--serve-limited", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.serve_limited:
        serve_limited()
        return
    rows = [int(count) for count in arguments.rows.split(",")]
    limited = LimitedTorch()
    results = []
    print(f"load average {os.getloadavg()[0]:.1f}; one thread; milliseconds (least);")
    print("then torch's median over ours: full torch over our best tier,")
    print("torch limited to AVX2 over our AVX2 tier")
    header = [name.removeprefix("exl3 ").replace("torch ", "t.") for name in COLUMNS]
    header += [f"/ {name}" for name in header[len(TIERS) :]]
    print(f"{'':24}{'rows':>5}" + "".join(f"{name:>13}" for name in header))
    for case in cases(rows):
        if arguments.only not in case.name:
            continue
        repeats = (
            arguments.repeats if case.rows <= 8 else max(7, arguments.repeats // 4)
        )
        timings = measure(
            case, arguments.tiers.split(","), limited, repeats, arguments.megabytes
        )
        print(describe(case, timings), flush=True)
        results.append(
            {**asdict(case), "ms": {n: asdict(t) for n, t in timings.items()}}
        )
    limited.close()
    print(f"load average {os.getloadavg()[0]:.1f}")
    if arguments.json:
        report = {"load_average": os.getloadavg(), "threads": 1, "cases": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
