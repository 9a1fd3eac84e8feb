# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The GPU script checks the CPU's ops: they pass, and wrong results are noticed."""

import subprocess
import sys
import time

import pytest
import torch

from benchmarks.device import correctness
from exl3 import ops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    monkeypatch.setattr(correctness, "RATES", [(64, 1), (40, 2)])
    monkeypatch.setattr(correctness, "ROWS", (1, 17))
    monkeypatch.setattr(correctness, "RANDOM_SHAPES", 6)
    monkeypatch.setattr(correctness, "MOE_WIDTHS", ((5, 2),))
    monkeypatch.setattr(correctness, "MOE_TOKENS", (1, 9))


def soon() -> float:
    return time.monotonic() + 300


@pytest.mark.parametrize("name", correctness.CHECKS)
def test_right_results_pass(name):
    found = correctness.CHECKS[name](CPU, soon())
    assert found["cases"] > 1
    assert found["failures"] == []


@pytest.mark.parametrize("name", correctness.CHECKS)
def test_wrong_results_are_reported(name, monkeypatch):
    right = getattr(ops, name)
    monkeypatch.setattr(
        ops, name, lambda *args, **kwargs: right(*args, **kwargs) * 1.01
    )
    found = correctness.CHECKS[name](CPU, soon())
    assert len(found["failures"]) >= found["cases"] - 1  # a token may have no expert


def test_results_that_change_are_reported(monkeypatch):
    right = ops.linear
    calls = []

    def unsteady(x, *args, **kwargs):
        calls.append(x)
        return right(x, *args, **kwargs) * (1 + 1e-6 * (len(calls) % 2))

    monkeypatch.setattr(ops, "linear", unsteady)
    found = correctness.check_linear(CPU, soon())
    assert any("two runs differ" in failure for failure in found["failures"])


@pytest.mark.parametrize("name", correctness.CHECKS)
def test_no_time_is_no_success(name):
    found = correctness.CHECKS[name](CPU, time.monotonic() - 1)
    assert found["failures"] == ["out of time"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "benchmarks.device.exl3_device"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("no GPU")
