# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The GPU script checks the CPU's ops: they pass, and wrong results are noticed."""

import argparse
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.device import (
    correctness,
    dense_speed,
    exl3_device,
    graphs,
    integer_rates,
    moe_speed,
    tools,
    tune,
)
from exl3 import ops, workspace
from exl3.plans import Plan, read

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
    op = "linear" if name == "plans" else name
    right = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
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


@pytest.fixture
def no_gpu(monkeypatch):
    """The script's stages on the CPU, with a clock that always says a millisecond."""

    def seconds_per_call(calls):
        for call in calls:
            call()
        return 1e-3

    card = SimpleNamespace(multi_processor_count=4)
    for module in (dense_speed, moe_speed):
        monkeypatch.setattr(module, "seconds_per_call", seconds_per_call)
        monkeypatch.setattr(module, "copies_beyond_cache", lambda size, device: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(workspace, "gpu", lambda device: (90, 4))
    monkeypatch.setattr(ops, "linear_plan", lambda *args: [16, 1, 0])
    monkeypatch.setattr(dense_speed, "SHAPES", ((256, 128),))
    monkeypatch.setattr(dense_speed, "ROWS", (1, 128))
    monkeypatch.setattr(dense_speed, "WORDS", (64,))
    monkeypatch.setattr(moe_speed, "HIDDEN", 128)
    monkeypatch.setattr(moe_speed, "INTERMEDIATE", 128)
    monkeypatch.setattr(moe_speed, "EXPERTS", 9)
    monkeypatch.setattr(moe_speed, "TOKENS", (1, 4))
    monkeypatch.setattr(exl3_device, "describe", lambda device: {"card": "none"})
    monkeypatch.setattr(
        exl3_device, "memory_bandwidth", lambda device: {"copy": 1e9, "read": 2e9}
    )
    monkeypatch.setattr(graphs, "check", lambda device, until: {"failures": []})
    monkeypatch.setattr(tools, "count", lambda until: {"skipped": ["counters: no"]})
    monkeypatch.setattr(tools, "check_races", lambda until: {"skipped": ["races: no"]})
    monkeypatch.setattr(integer_rates, "measure", lambda device: {"per_clock": {}})


def test_the_script_runs_every_stage(no_gpu, tmp_path, capsys):
    report = exl3_device.Report(tmp_path / "out.json", soon())
    assert exl3_device.run_all(CPU, report)
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(exl3_device.SHARES) <= set(found)
    assert len(found["dense"]["results"]) == 4  # rows and codebooks
    assert len(found["moe speed"]["results"]) == 12  # mixes, codebooks and tokens
    said = capsys.readouterr().out
    assert "skipped: races: no" in said
    assert "skipped: exllamav3: not usable here" in said
    assert "percent_of_bandwidth" in said


def test_no_speed_is_measured_of_wrong_results(no_gpu, tmp_path, monkeypatch):
    right = ops.linear
    monkeypatch.setattr(
        ops, "linear", lambda *args, **kwargs: right(*args, **kwargs) + 1
    )
    report = exl3_device.Report(tmp_path / "out.json", soon())
    assert not exl3_device.run_all(CPU, report)
    assert "dense" not in report.found and "moe speed" in report.found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "benchmarks.device.exl3_device"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("no GPU")


def test_tuning_keeps_what_is_faster(no_gpu, tmp_path, monkeypatch, capsys):
    """The clock says that two splits take half the rule's time for one row."""
    given: list[Plan] = []

    def seconds_per_call(calls):
        fast = given and given[0].splits == 2 and given[0].rows[1] == 1
        return 0.5e-3 if fast else 1e-3

    monkeypatch.setattr(tune, "seconds_per_call", seconds_per_call)
    monkeypatch.setattr(tune, "copies_beyond_cache", lambda size, device: 2)
    monkeypatch.setattr(tune, "ROW_RANGES", ((1, 1), (17, 32)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))

    def set_plans(plans):
        given[:] = plans

    monkeypatch.setattr(ops, "set_plans", set_plans)
    path = tmp_path / "plans.json"
    shapes = exl3_device.parse_shapes("1024x128,512x256")
    exl3_device.run_tuning(CPU, path, shapes, 4, True, soon())
    assert read(path) == [
        Plan("12.0", k, n, (1, 1), 16, 2, unrounded)
        for k, n, unrounded in ((1024, 128, False), (512, 256, False))
    ]
    assert given == []  # what was measured last is not what stays
    said = capsys.readouterr().out
    assert "k 512, n 256, rows 17 to 32: 1000.0 us by the rule\n" in said
    assert "2 plans written" in said


def test_tuning_refuses_wrong_results(no_gpu, tmp_path, monkeypatch):
    right = ops.linear
    calls = []

    def wrong(x, *args, **kwargs):
        calls.append(x)
        return right(x, *args, **kwargs) * (1 if len(calls) == 1 else 1.1)

    monkeypatch.setattr(ops, "linear", wrong)
    monkeypatch.setattr(ops, "set_plans", lambda plans: None)
    monkeypatch.setattr(tune, "seconds_per_call", lambda calls: 1.0)
    monkeypatch.setattr(tune, "copies_beyond_cache", lambda size, device: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(RuntimeError, match=r"differs from the rule.s by 1\.0e-01"):
        exl3_device.run_tuning(CPU, tmp_path / "p.json", [(256, 128)], 4, False, soon())


def test_candidates_fit_their_rows():
    few = list(tune.candidates("9.0", 4096, 4096, (1, 1), True))
    assert {plan.block_rows for plan in few} == {16}
    assert {plan.splits for plan in few} == set(tune.SPLITS)
    assert len(few) == 2 * len(tune.SPLITS)  # rounded and not
    many = list(tune.candidates("9.0", 4096, 4096, (1025, 2048), True))
    assert {(plan.block_rows, plan.splits) for plan in many} == {(128, 1), (128, 2)}
    short = list(tune.candidates("9.0", 512, 4096, (33, 48), False))
    assert {plan.splits for plan in short} == {1, 2}


@pytest.mark.parametrize("text", ("4096", "4096x100", "x128", "128x128,"))
def test_a_bad_shape_is_named(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write k x n"):
        exl3_device.parse_shapes(text)
