# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How a server ends: when it is told to, and when a process of it dies."""

import time
from contextlib import ExitStack

import psutil
import pytest

from tests.robustness.served import Server, events

#: Seconds within which the death of a process has to be seen. The server looks every 5.
SEEN = 10
#: Seconds within which the server is gone then: it closes what is open, and waits for
#: its other processes.
GONE = 30


def test_sigterm_lets_a_stream_finish(server):
    with server.open(
        prompt=[7],
        max_tokens=400,
        stream=True,
        return_token_ids=True,
        stream_options={"include_usage": True},
    ) as stream:
        start = b"".join(stream.readline() for _ in range(4))
        server.process.terminate()
        rest = stream.read()
    *_, last, usage = events((start + rest).decode())
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 400
    assert server.process.wait(timeout=60) == 0


@pytest.fixture
def crowd():
    """Opens a stream that goes on for longer than the test, if it is to be busy."""
    with ExitStack() as streams:

        def join(server):
            stream = streams.enter_context(
                server.open(prompt=[7], max_tokens=2000, stream=True)
            )
            assert stream.readline().startswith(b"data: ")
            return stream

        yield join


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize(
    ("title", "options"),
    [("EngineCore", []), ("Worker_TP1", ["--tensor-parallel-size", "2"])],
)
def test_a_death_is_seen(tmp_path, crowd, title, options, busy):
    server = Server(tmp_path, *options)
    try:
        processes = server.processes()
        stream = crowd(server) if busy else None
        server.named(title).kill()
        killed = time.monotonic()
        while server.health() == 200:
            assert time.monotonic() - killed < SEEN
            time.sleep(0.05)
        if stream:
            *_, last = events(stream.read().decode())
            assert last["error"]["code"] == 500
            assert time.monotonic() - killed < SEEN
        assert server.process.wait(timeout=GONE) == 1
        assert "error: the engine died" in server.log()
        assert not psutil.wait_procs(processes, timeout=SEEN)[1]
    finally:
        server.kill()


@pytest.mark.slow
def test_no_process_outlives_the_server(tmp_path):
    server = Server(tmp_path)
    try:
        processes = server.processes()
        assert len(processes) > 1
        server.process.kill()
        assert not psutil.wait_procs(processes, timeout=SEEN)[1]
    finally:
        server.kill()
