# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""NVIDIA's tools on a few calls: races in shared memory, and what the hardware counts.

They start a Python of their own, which runs `python -m benchmarks.device.tools CASE`.
"""

import csv
import shutil
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.device.layers import random_matrix
from exl3 import ops, workspace

#: Small ones for the sanitizer, which is slow: rows, k, n, words, codebook. Split sums,
#: blocks of 32 and 128 rows, and half a rate.
RACE_CASES = (
    (1, 1024, 128, 64, 1),
    (20, 512, 256, 48, 2),
    (70, 256, 128, 96, 0),
    (3, 2048, 128, 40, 2),
)
COUNTED_CASES = (
    (1, 5120, 17408, 64, 1),
    (16, 5120, 17408, 48, 1),
    (512, 5120, 17408, 64, 2),
)
COUNTERS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed.avg.per_cycle_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)


def check_races(deadline: float) -> dict[str, Any]:
    """compute-sanitizer's racecheck and synccheck on small calls."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"skipped": ["races: compute-sanitizer is not installed"]}
    results = {}
    for kind in ("racecheck", "synccheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9"]
        code, said = _run([*command, *_self("races")], deadline)
        results[kind] = {0: "clean", 9: "errors"}.get(code, "did not run")
        if code != 0:
            results[f"{kind}_said"] = said[-2000:]
    failures = [kind for kind, result in results.items() if result == "errors"]
    skipped = [
        f"races: {kind} did not run here"
        for kind, result in results.items()
        if result == "did not run"
    ]
    return {**results, "failures": failures, "skipped": skipped}


def count(deadline: float) -> dict[str, Any]:
    """Nsight Compute's counters of three products."""
    tool = shutil.which("ncu")
    if tool is None:
        return {"skipped": ["counters: ncu is not installed"]}
    command = [tool, "--csv", "--clock-control", "none"]
    command += ["--kernel-name", "regex:gemm_kernel", "--metrics", ",".join(COUNTERS)]
    code, said = _run([*command, *_self("counted")], deadline)
    lines = [line for line in said.splitlines() if line.startswith('"')]
    if code != 0 or not lines:
        return {"skipped": [f"counters: ncu did not run here: {said[-300:].strip()}"]}
    rows = [
        {
            name: row[name]
            for name in ("ID", "Metric Name", "Metric Unit", "Metric Value")
        }
        for row in csv.DictReader(lines)
    ]
    return {"cases": COUNTED_CASES, "counters": rows}


def _self(case: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.device.tools", case]


def _run(command: list[str], deadline: float) -> tuple[int, str]:
    left = deadline - time.monotonic()
    if left <= 0:
        return -1, "out of time"
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=left,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, "out of time"
    return done.returncode, done.stdout


def main() -> None:
    """Runs the cases named by the argument, each once."""
    device = torch.device("cuda", torch.cuda.current_device())
    for rows, k, n, words, codebook in (
        RACE_CASES if sys.argv[1] == "races" else COUNTED_CASES
    ):
        matrix = random_matrix(k, n, words, codebook, device)
        need = workspace.linear_bytes(rows, k, matrix.shards, device)
        workspace.reserve(device, need)
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        ops.linear(x, matrix.trellis, matrix.suh, matrix.svh, None, matrix.shards)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
