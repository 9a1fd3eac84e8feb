# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A result file: what was measured, on what, and how."""

import json
import platform
import shutil
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.points import Point
from benchmarks.serving.server import BenchmarkError


@dataclass(frozen=True)
class Series:
    """The points of one server.

    Attributes:
        name: What tells it from the others, such as "MTP 1".
        options: The words that it was started with, if it was.
        kv_cache_tokens: Tokens that its KV cache holds, if it says so.
        points: In the order of measuring.
        left_out: Why points are missing, a line each.
    """

    name: str
    options: list[str]
    kv_cache_tokens: int | None
    points: list[Point]
    left_out: list[str]


@dataclass(frozen=True)
class Result:
    """All series of one model on one machine.

    Attributes:
        model: The folder's name, or the hub's.
        machine: Its GPUs, or its processor.
        version: vLLM's.
        date: Of the day, as in 2026-11-30.
        series: In the order of measuring.
    """

    model: str
    machine: str
    version: str
    date: str
    series: list[Series]


def write(result: Result, file: Path) -> None:
    """Writes a result file."""
    file.write_text(json.dumps(asdict(result), indent=2) + "\n")


def read(file: Path) -> Result:
    """Reads a result file.

    Raises:
        BenchmarkError: It is none.
    """
    try:
        return _result(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchmarkError(f"{file}: is no result file: {error!r}") from error


def _result(data: dict[str, Any]) -> Result:
    series = [
        Series(**{**each, "points": [Point(**point) for point in each["points"]]})
        for each in data["series"]
    ]
    return Result(**{**data, "series": series})


def machine() -> str:
    """This machine's GPUs, or its processor where there are none."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(command, capture_output=True, text=True).stdout
        counts = Counter(names.strip().splitlines())
        if counts:
            return ", ".join(f"{count}x {name}" for name, count in counts.items())
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    cores = len(models) or 1
    return f"{cores} cores of {models[0] if models else platform.machine()}"
