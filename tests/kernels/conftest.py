# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The CUDA kernels, compiled for the emulator once for all tests."""

import os

import pytest

from tests.kernels.emulated.moe import EmulatedMoe
from tests.kernels.emulated.ops import EmulatedOps

#: Set by test_emu_sanitized.py, which runs a few of the tests: fewer kernels do.
SANITIZE = "EXL3_EMU_SANITIZE" in os.environ


@pytest.fixture(scope="session")
def emulated() -> EmulatedOps:
    if SANITIZE:
        return EmulatedOps((24, 48, 64, 112), optimize="-O1", sanitize=True)
    return EmulatedOps()


@pytest.fixture(scope="session")
def emulated_moe() -> EmulatedMoe:
    if SANITIZE:
        return EmulatedMoe((32, 48, 64, 96), optimize="-O1", sanitize=True)
    return EmulatedMoe()
