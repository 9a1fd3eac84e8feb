# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The emulator and its kernels under the sanitizers of addresses and of C++."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.emulated.build import ROOT

#: One kernel of each decoder and number of rows, the experts, and every other kernel.
CHOSEN = " or ".join(
    [
        *(f"test_every_kernel[{kind}]" for kind in ("48-1-16", "112-0-64", "24-2-128")),
        *("test_fused", "test_dequantized_with", "test_hadamard", "test_slices"),
        *(
            "test_experts_elsewhere",
            "test_integers_of_unusual_rows",
            "test_unrounded_weights_of",
        ),
    ]
)


@pytest.mark.slow
def test_under_sanitizers() -> None:
    """The sanitizers' libraries must be loaded before Python's own allocator."""
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "EXL3_EMU_SANITIZE": "1",
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    files = [
        Path(__file__).with_name(f"test_emu_{name}.py") for name in ("linear", "moe")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *files, "-k", CHOSEN],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
