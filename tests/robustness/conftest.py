# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""One server for as many tests as it survives."""

import pytest

from tests.robustness.served import Server


class Shared:
    """The server that is up, if any."""

    def __init__(self, folders):
        self._folders = folders
        self._server = None

    def running(self):
        """That server, or a new one if a test has ended it."""
        if self._server is None or self._server.process.poll() is not None:
            self._server = Server(self._folders.mktemp("server"))
        return self._server

    def close(self):
        """Ends it, whatever it is doing."""
        if self._server is not None:
            self._server.kill()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    shared = Shared(tmp_path_factory)
    yield shared
    shared.close()


@pytest.fixture
def server(shared):
    return shared.running()
