# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The CUDA kernels, compiled for the emulator once for all tests."""

import pytest

from tests.kernels.emulated.ops import EmulatedOps


@pytest.fixture(scope="session")
def emulated() -> EmulatedOps:
    return EmulatedOps()
