# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""An engine's process does not outlive the process that started it."""

import subprocess
import sys

import psutil
import pytest

#: A server that starts an engine, says so with its process id, and does nothing.
SERVER = """
import multiprocessing, sys, time
from vllm.v1.engine import core

def engine(*, ignored):
    # As the real one, which waits in a loop for what its clients ask.
    print(multiprocessing.current_process().pid, flush=True)
    while True:
        time.sleep(60)

core._upstream_run_engine_core = engine
context = multiprocessing.get_context("fork")
started = context.Process(
    target=core.EngineCoreProc.run_engine_core, kwargs={"ignored": 1}
)
started.start()
sys.stdin.read()
started.terminate()
"""


@pytest.fixture
def pair():
    """The process of such a server, and the one of its engine."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    engine = psutil.Process(int(server.stdout.readline()))
    yield server, engine
    server.kill()
    if engine.is_running():
        engine.kill()
    server.communicate()


def test_an_engine_ends_with_its_server_and_not_before(pair):
    server, engine = pair
    with pytest.raises(psutil.TimeoutExpired):
        engine.wait(timeout=1)
    assert server.poll() is None
    server.kill()
    engine.wait(timeout=10)
