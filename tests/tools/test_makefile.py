# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`make` alone says what can be done."""

import re
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-C", str(REPO), "--no-print-directory", *words],
        capture_output=True,
        text=True,
    )


def test_help_lists_every_command():
    makefile = (REPO / "Makefile").read_text().replace("\\\n", " ")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    listed = [line.split()[1] for line in make().stdout.splitlines()]
    assert listed == phony.split()


def test_missing_interpreter_is_said_in_one_line(tmp_path):
    # Another name for the linters' environment, so that there is something to make.
    said = make("lint", f"LINT={tmp_path}", "PYTHON=python3.99")
    assert said.returncode != 0
    first, *_ = said.stderr.splitlines()
    assert first == "missing: Python: there is no python3.99 on PATH"
