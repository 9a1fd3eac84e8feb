# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How the tests are shared among processes."""

import os
from pathlib import Path

import pytest

# Two processes test at once. Threads of one that spin while they wait would take the
# cores from the other. It is read when torch is loaded, here and in processes that
# tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A folder's tests run in one process: they share engines and compiled kernels."""
    for item in items:
        folder = item.path.relative_to(_HERE).parts[0]
        item.add_marker(pytest.mark.xdist_group(folder))
