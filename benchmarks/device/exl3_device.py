# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Checks the EXL3 kernels on a GPU, then measures them; at most 8 minutes.

    python -m benchmarks.device.exl3_device --out exl3-device.json

It needs torch and the library `exl3` with its CUDA kernels, and no vLLM:

    cmake -S . -B build/device -G Ninja -DEXL3_CUDA=ON && cmake --build build/device
    cp build/device/_C.abi3.so exl3/

Speed is only measured if the results are right. The figures are written after every
stage, so that a run that is stopped leaves what it had.

With --tune it measures plans instead, for a server's EXL3_CUDA_PLANS:

    python -m benchmarks.device.exl3_device --tune plans.json --shapes 4096x6144
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import dense_speed, graphs, integer_rates, moe_speed, tools, tune
from benchmarks.device.correctness import CHECKS
from benchmarks.device.timing import memory_bandwidth
from exl3 import ops, plans

MINUTES = 8.0
#: Shares of the time that is left when a stage begins; the stages run in this order.
SHARES = {
    "dequant": 0.1,
    "linear": 0.3,
    "plans": 0.1,
    "moe": 0.25,
    "graphs": 0.1,
    "rates": 1.0,
    "bandwidth": 1.0,
    "dense": 0.6,
    "moe speed": 0.5,
    "counters": 0.5,
    "races": 1.0,
}


class Report:
    """What was found, on disk after every stage."""

    def __init__(self, path: Path, deadline: float):
        self.path = path
        self.deadline = deadline
        self.found: dict[str, Any] = {}

    def run(self, name: str, stage: Callable[[float], dict[str, Any]]) -> bool:
        """Runs a stage until its share of the time is used. True if nothing failed."""
        start = time.monotonic()
        left = self.deadline - start
        print(f"{name}: ...", flush=True)
        try:
            found = stage(start + left * SHARES[name])
        except (RuntimeError, NotImplementedError) as error:
            found = {"failures": [f"{type(error).__name__}: {error}".split("\n")[0]]}
        found["seconds"] = round(time.monotonic() - start, 1)
        self.add(name, found)
        failures = found.get("failures", [])
        verdict = f"{len(failures)} failures" if failures else "done"
        print(f"{name}: {verdict} in {found['seconds']} s", flush=True)
        for line in [
            *failures[:10],
            *(f"skipped: {s}" for s in found.get("skipped", [])),
        ]:
            print(f"  {line}", flush=True)
        return not failures

    def add(self, name: str, found: Any) -> None:
        """Keeps and writes something."""
        self.found[name] = found
        self.path.write_text(json.dumps(self.found, indent=1))


def describe(device: torch.device) -> dict[str, Any]:
    """The card and the software."""
    card = torch.cuda.get_device_properties(device)
    return {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "memory_bytes": card.total_memory,
        "cache_bytes": card.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def table(results: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """A plain table; `columns` maps fields to formats."""
    lines = ["  ".join(f"{name:>20}" for name in columns)]
    for result in results:
        cells = (
            format(result[name], style) if name in result else "-"
            for name, style in columns.items()
        )
        lines.append("  ".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def run_all(device: torch.device, report: Report) -> bool:
    """Runs every stage. True if all checks passed."""
    report.add("device", describe(device))
    print(report.found["device"], flush=True)
    right = [
        report.run(name, lambda until, check=check: check(device, until))
        for name, check in CHECKS.items()
    ]
    checks = dict(zip(CHECKS, right))
    right.append(report.run("graphs", lambda until: graphs.check(device, until)))
    report.run("rates", lambda _: integer_rates.measure(device))
    if not report.run("bandwidth", lambda _: memory_bandwidth(device)):
        print("no speed was measured: the GPU no longer works, after what failed above")
        return False
    bandwidth = report.found["bandwidth"]
    most = max(bandwidth["copy"], bandwidth["read"])
    print(f"  copying {bandwidth['copy'] / 1e9:.0f} GB/s, ", end="")
    print(f"reading {bandwidth['read'] / 1e9:.0f} GB/s", flush=True)
    if checks["linear"]:
        report.run("dense", lambda until: dense_speed.measure(device, most, until))
        print(
            table(
                report.found["dense"].get("results", []),
                {
                    "rows": "d",
                    "k": "d",
                    "n": "d",
                    "codebook": "",
                    "bits": "g",
                    "us": ".1f",
                    "percent_of_bandwidth": ".0f",
                    "tflops": ".1f",
                    "times_bf16": ".2f",
                    "reconstruct_us": ".1f",
                    "exllamav3_us": ".1f",
                },
            )
        )
    else:
        print("skipped: the speed of linear, since its results are wrong")
    if checks["moe"]:
        report.run("moe speed", lambda until: moe_speed.measure(device, most, until))
        print(
            table(
                report.found["moe speed"].get("results", []),
                {
                    "experts": "",
                    "codebook": "",
                    "tokens": "d",
                    "us": ".1f",
                    "percent_of_bandwidth": ".0f",
                    "tflops": ".1f",
                },
            )
        )
    else:
        print("skipped: the speed of moe, since its results are wrong")
    right.append(report.run("counters", tools.count))
    right.append(report.run("races", tools.check_races))
    return all(right)


def run_tuning(
    device: torch.device,
    path: Path,
    shapes: list[tuple[int, int]],
    bits: int,
    unrounded: bool,
    deadline: float,
) -> None:
    """Writes the plans that are faster than the rule's; see `tune.tune`."""
    found = []
    for plan, line in tune.tune(device, shapes, bits, unrounded, deadline):
        print(line, flush=True)
        if plan is not None:
            found.append(plan)
            plans.write(path, found)
    plans.write(path, found)
    print(
        f"{len(found)} plans written to {path}; a server reads them by "
        f"{plans.VARIABLE}={path}"
    )


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """From "4096x6144,4096x4096" to [(4096, 6144), (4096, 4096)]."""
    shapes = []
    for shape in text.split(","):
        k, _, n = shape.partition("x")
        if not (k.isdecimal() and n.isdecimal() and int(k) % 128 == int(n) % 128 == 0):
            raise argparse.ArgumentTypeError(
                f"{shape!r}: write k x n, multiples of 128, as in 4096x6144"
            )
        shapes.append((int(k), int(n)))
    return shapes


def main() -> int:
    """Returns 0 if all checks passed, 1 if one failed, 2 if nothing was run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("exl3-device.json"))
    parser.add_argument("--minutes", type=float, default=MINUTES, help="at most")
    parser.add_argument("--tune", type=Path, metavar="FILE", help="write plans here")
    parser.add_argument(
        "--shapes",
        type=parse_shapes,
        default=list(dense_speed.SHAPES),
        help="to tune: stored k x n of each product, as in 4096x6144,4096x4096",
    )
    parser.add_argument("--bits", type=int, default=4, help="to tune with: 1 to 8")
    parser.add_argument(
        "--unrounded",
        action="store_true",
        help="plans may leave 3inst's and mcg's weights unrounded (2.3e-4)",
    )
    args = parser.parse_args()
    if not 1 <= args.bits <= 8:
        parser.error(f"--bits is {args.bits}; it can be 1 to 8")
    if not torch.cuda.is_available():
        print("no GPU: torch finds none, and nothing was run", file=sys.stderr)
        return 2
    if not ops.has_cuda():
        print(
            "no kernels: exl3 was built without CUDA, and nothing was run; "
            "this file's head says how to build it",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    deadline = time.monotonic() + 60 * args.minutes
    if args.tune is not None:
        run_tuning(device, args.tune, args.shapes, args.bits, args.unrounded, deadline)
        return 0
    report = Report(args.out, deadline)
    passed = run_all(device, report)
    print(f"written to {args.out}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
