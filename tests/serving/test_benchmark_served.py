# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The serving benchmark measures the demo model, with and without its draft."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serving.results import read
from benchmarks.serving.tables import table
from tests.serving.generate import REPO

pytestmark = pytest.mark.slow

MODEL = REPO / "examples" / "demo-glm-dsa-ragged-exl3"


def test_it_measures_a_server_that_it_starts(tmp_path):
    file = tmp_path / "demo.json"
    command = [sys.executable, "-m", "benchmarks.serving.run", "--model", str(MODEL)]
    command += ["--mtp", "0", "1", "--streams", "1", "2", "--prompt", "64", "4096"]
    command += ["--output", "32", "--rounds", "2", "--json", str(file)]
    command += ["--plot", str(tmp_path / "demo.svg")]
    done = subprocess.run(
        [*command, "--", "--max-model-len", "512", "--enforce-eager"],
        capture_output=True,
        text=True,
        cwd=REPO,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    result = read(file)
    assert done.stdout.strip() == table(result)
    assert result.model == Path(MODEL).name

    plain, drafted = result.series
    assert (plain.name, drafted.name) == ("no MTP", "MTP 1")
    for series in result.series:
        assert [point.streams for point in series.points] == [1, 2]
        assert len(series.left_out) == 2  # prompts of 4,096
        # The CPU's cache of 1 GiB holds more than one request of the longest kind.
        assert series.kv_cache_tokens is not None and series.kv_cache_tokens > 512
    assert all(point.acceptance is None for point in plain.points)
    for point in drafted.points:
        assert 0 < point.acceptance <= 1
        # One draft token: so many are accepted a step, and one comes anyway.
        assert point.accepted_length == pytest.approx(1 + point.acceptance)
    assert (tmp_path / "demo.svg").exists()
