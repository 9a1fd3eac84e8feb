# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""TORCH_CUDA_ARCH_LIST, as the build of the CUDA kernels reads it."""

import os
import subprocess
from pathlib import Path

import cmake
import pytest

SCRIPT = Path(__file__).parents[2] / "csrc" / "cuda_architectures.cmake"


def ask(architectures: str | None) -> subprocess.CompletedProcess:
    """Runs the script by itself, which prints nvcc's flags."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_CUDA_ARCH_LIST"}
    if architectures is not None:
        environment["TORCH_CUDA_ARCH_LIST"] = architectures
    command = [Path(cmake.CMAKE_BIN_DIR) / "cmake", "-P", SCRIPT]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )


def code(number: str, kind: str = "sm") -> str:
    return f"-gencode=arch=compute_{number},code={kind}_{number}"


@pytest.mark.parametrize(
    "architectures, flags",
    [
        (None, [code(n) for n in ("80", "86", "89", "90a", "100f", "120f")]),
        ("", [code(n) for n in ("80", "86", "89", "90a", "100f", "120f")]),
        ("9.0a;12.0f", [code("90a"), code("120f")]),
        ("8.0 9.0", [code("80"), code("90")]),
        ("8.9, 12.1", [code("89"), code("121")]),
        ("12.0f+PTX", [code("120f"), code("120f", "compute")]),
    ],
)
def test_flags(architectures, flags):
    done = ask(architectures)
    assert done.returncode == 0
    assert done.stderr.strip().split(";") == flags


@pytest.mark.parametrize("name", ["Hopper", "90a", "9.0x", "12", "9.0a-real"])
def test_what_is_no_number_is_refused_by_name(name):
    done = ask(f"8.0;{name}")
    assert done.returncode != 0
    assert f"TORCH_CUDA_ARCH_LIST: '{name}' is no architecture" in done.stderr


@pytest.mark.parametrize("name", ["7.5", "6.1+PTX"])
def test_what_has_no_fitting_tensor_cores_is_refused(name):
    done = ask(name)
    assert done.returncode != 0
    assert f"TORCH_CUDA_ARCH_LIST: {name}: the kernels need" in done.stderr
