# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How the tests are shared among processes."""

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Two processes test at once. Threads of one that spin while they wait would take the
# cores from the other. It is read when torch is loaded, here and in processes that
# tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


#: The folders that take longest. Begun last, one would be tested alone at the end.
FIRST = ["serving", "kernels"]


class ByFolder(LoadScopeScheduling):
    """A folder's tests run in one process: they share engines and compiled kernels."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("/")[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        folder = item.nodeid.split("/")[1]
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=rank)


def pytest_xdist_make_scheduler(
    config: pytest.Config, log: Producer
) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # not by the number of tests
    return ByFolder(config, log)
