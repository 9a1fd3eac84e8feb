# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`vllm exl3 ...` is `exl3 ...`, and `vllm` knows of it."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MODEL = "examples/demo-glm-dsa-exl3"


def run(*command):
    return subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=REPO
    )


def vllm(*arguments):
    return run("vllm.entrypoints.cli.main", *arguments)


def test_it_is_the_same_command():
    inner, outer = run("exl3.cli", "inspect", MODEL), vllm("exl3", "inspect", MODEL)
    assert outer.returncode == 0
    assert outer.stdout == inner.stdout
    assert "tensor parallel" in outer.stdout


def test_its_exit_codes_and_errors_are_the_same(tmp_path):
    refused = vllm("exl3", "inspect", str(tmp_path))
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("exl3: ")
    assert vllm("exl3", "inspect").returncode == 2


def test_upstreams_commands_come_after_it():
    """Upstream's main, and what it imports for each command, is not needed."""
    code = (
        "import sys; sys.argv = ['vllm', 'exl3', 'inspect', sys.argv[1]]\n"
        "from vllm.entrypoints.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as error: assert error.code == 0\n"
        "assert 'vllm.entrypoints.cli.serve' not in sys.modules\n"
        "assert 'vllm.engine.arg_utils' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, MODEL], cwd=REPO, check=False)
    assert done.returncode == 0


@pytest.mark.slow  # upstream imports every command's modules to list them
def test_vllm_lists_it():
    listed = vllm("--help")
    assert listed.returncode == 0
    lines = [line.split() for line in listed.stdout.splitlines()]
    assert ["exl3", "Inspect,"] in [words[:2] for words in lines]
    assert ["collect-env", "Start"] in [words[:2] for words in lines]
