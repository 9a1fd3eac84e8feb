# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The server's exit code tells the death of its engine from a stop."""

import asyncio

import pytest

from vllm.entrypoints.launchers.api_server import entry


class Engine:
    errored = False

    def shutdown(self, timeout=None):
        self.errored = True  # as upstream's, which no longer runs


@pytest.fixture
def serve(monkeypatch):
    """Serves an engine until `happens` to it; returns whether the rest was awaited."""

    def serve(happens):
        awaited = []

        async def rest():
            awaited.append(True)

        async def serving(engine, address):
            assert address == "address"
            happens(engine)
            return rest()

        async def both():
            await (await entry.build_and_serve(Engine(), "address"))

        monkeypatch.setattr(entry, "_upstream_build_and_serve", serving)
        try:
            asyncio.run(both())
        finally:
            assert awaited == [True]

    return serve


def test_a_stop_is_no_error(serve):
    serve(lambda engine: engine.shutdown(timeout=0))


def test_an_end_without_either_is_none(serve):
    serve(lambda engine: None)


def test_a_death_is_an_error(serve):
    with pytest.raises(SystemExit, match="error: the engine died"):
        serve(lambda engine: setattr(engine, "errored", True))
