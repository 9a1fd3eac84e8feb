# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a machine lacks is said in one line each, before anything is fetched."""

import ast
import json
import platform
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tools import preflight

SOURCE = Path(preflight.__file__)
GOOD = {"path": "/py", "version": [3, 12, 1], "venv": True, "headers": True}


def fake_python(folder: Path, name: str, version: list[int]) -> Path:
    """An executable that answers the probe as a Python of some version would."""
    path = folder / name
    facts = {**GOOD, "path": str(path), "version": version}
    path.write_text(f"#!/bin/sh\necho '{json.dumps(facts)}'\n")
    path.chmod(0o755)
    return path


def only_problem(facts: dict, venv: Path) -> str:
    (problem,) = preflight.build_problems(facts, venv)
    assert "\n" not in problem
    return problem


def test_old_pythons_can_read_it():
    """It has to run where the fork can't, to say so."""
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 6))
    # Those are evaluated when the file is loaded: `dict | None` would raise.
    annotations = [
        note
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for note in [node.returns, *(arg.annotation for arg in node.args.args)]
    ]
    assert annotations
    assert all(isinstance(note, ast.Name | ast.Constant) for note in annotations)


def test_range_of_versions_is_that_of_the_package():
    oldest, newest = preflight.OLDEST, preflight.NEWEST
    stated = f'python_requires=">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"'
    assert stated in (preflight.REPO / "setup.py").read_text()


def test_this_interpreter_is_chosen_and_printed():
    said = subprocess.run(
        [sys.executable, str(SOURCE), "--python-only"], capture_output=True, text=True
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.strip() == sys.executable


@pytest.mark.parametrize("version", [[3, 11, 0], [3, 14, 2]])
def test_supported_python_is_kept(tmp_path, version):
    asked = fake_python(tmp_path, "python3", version)
    facts = preflight.choose_python(str(asked))
    assert facts["path"] == str(asked)
    assert preflight.python_problem(facts) is None


@pytest.mark.parametrize("version", [[3, 10, 13], [3, 15, 0]])
def test_unsupported_python_gives_way_to_one_on_path(
    tmp_path, monkeypatch, capsys, version
):
    asked = fake_python(tmp_path, "python3", version)
    other = fake_python(tmp_path, "python3.12", [3, 12, 9])
    # A version manager's shim: there, but with no Python behind it.
    shim = tmp_path / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert preflight.choose_python(str(asked))["path"] == str(other)
    assert str(other) in capsys.readouterr().err


def test_unsupported_python_alone_is_named(tmp_path, monkeypatch):
    asked = fake_python(tmp_path, "python3", [3, 9, 18])
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = preflight.python_problem(preflight.choose_python(str(asked)))
    assert problem is not None
    assert f"found 3.9.18 ({asked}), need 3.11 to 3.14" in problem


def test_missing_venv_module():
    problem = preflight.python_problem({**GOOD, "venv": False})
    assert problem is not None
    assert "python3-venv" in problem


@pytest.mark.parametrize(
    ("cxx", "named"), [("", "g++"), ("clang++-99 -v", "clang++-99")]
)
def test_missing_compiler(tmp_path, monkeypatch, cxx, named):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    assert f"found no {named}" in only_problem(GOOD, tmp_path)


def test_missing_cuda_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nvcc"))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    monkeypatch.delenv("EXL3_CUDA", raising=False)
    assert f"found no {tmp_path}/nvcc" in only_problem(GOOD, tmp_path)
    monkeypatch.setenv("EXL3_CUDA", "0")
    assert preflight.build_problems(GOOD, tmp_path) == []
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "empty")
    monkeypatch.setenv("EXL3_CUDA", "1")
    assert "CUDA compiler" in only_problem(GOOD, tmp_path)


def test_missing_libnuma(tmp_path, monkeypatch):
    """Upstream's CPU wheel does not bring it, and without it serves nothing."""
    monkeypatch.setattr(preflight, "LIBNUMA", "libnuma.so.0")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert "found no libnuma.so.0" in only_problem(GOOD, tmp_path)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "empty")
    assert preflight.build_problems(GOOD, tmp_path) == []


def test_missing_headers(tmp_path):
    problem = only_problem({**GOOD, "headers": False}, tmp_path)
    assert "/py has no Python.h" in problem


def test_full_disk(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2.3e9))
    assert "2.3 GB are free" in only_problem(GOOD, tmp_path)
    assert "needs 5 GB" in only_problem(GOOD, tmp_path)
    (tmp_path / ".built").touch()  # what it needs is mostly there
    assert preflight.build_problems(GOOD, tmp_path) == []


def test_environment_of_another_python(tmp_path):
    (tmp_path / "bin").mkdir()
    fake_python(tmp_path / "bin", "python", [3, 11, 7])
    problem = only_problem(GOOD, tmp_path)
    assert "was made with Python 3.11.7, not 3.12.1; run `make clean`" in problem


def test_machine_without_a_wheel(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "found Linux on riscv64" in only_problem(GOOD, tmp_path)
