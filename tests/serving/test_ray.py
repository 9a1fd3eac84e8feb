# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Two Ray nodes serve one model, and the server ends when one of them does.

Both nodes are on this machine: a raylet each, with half of its cores and room for one
rank. So ranks reach each other as over a network, but for the CPU's collectives, which
use shared memory where there is any.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.serving.generate import PROMPTS, REPO, Case, free_port, run

pytestmark = pytest.mark.slow

MODEL = REPO / "examples" / "demo-glm-dsa-ragged-exl3"
PARALLEL = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
}
#: Seconds after the death of a node's processes within which the server has to be gone.
#: The executor looks every 5, and so does the server.
BOUND = 60


@contextmanager
def cores(chosen):
    """Processes that start in the meantime run on these cores only."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


class Nodes:
    """Two nodes of Ray: one stays, one can be killed and replaced."""

    def __init__(self, folder):
        every = sorted(os.sched_getaffinity(0))
        middle = len(every) // 2
        self._halves = every[:middle] or every, every[middle:]
        self._options = {
            "num_cpus": 0,  # no idle workers
            "resources": {"vllm_cpu": 1},
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
            "temp_dir": folder,
        }
        with cores(self._halves[0]):
            self.cluster = Cluster(initialize_head=True, head_node_args=self._options)
        self._second = None

    def add(self):
        """Starts the second node, if it isn't there."""
        if self._second is None:
            with cores(self._halves[1]):
                self._second = self.cluster.add_node(**self._options)

    def kill(self):
        """Kills the second node, as a power cut would."""
        node, self._second = self._second, None
        self.cluster.remove_node(node, allow_graceful=False)

    def stop(self):
        """Stops what is left."""
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes():
    # Not pytest's folder: the path of a socket has a hundred characters at most.
    folder = tempfile.mkdtemp(prefix="ray")
    with pytest.MonkeyPatch.context() as patch:
        # Not set, it depends on whether this user has a token of Ray's.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        # Ray's own folder below it, where it writes a cluster's address; it makes none.
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        nodes = Nodes(f"{folder}/ray")
        yield nodes
        nodes.stop()
    shutil.rmtree(folder)


class Server:
    """The OpenAI server of the demo model over both nodes."""

    def __init__(self, address, parallel, log):
        self._log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", os.path.relpath(MODEL, REPO), "--port", str(port)]
        command += ["--served-model-name", "demo", "--distributed-executor-backend"]
        command += ["ray", PARALLEL[parallel], "2", "--dtype", "float32"]
        command += ["--enforce-eager", "--max-model-len", "2048"]
        env = {"RAY_ADDRESS": address, "VLLM_CPU_KVCACHE_SPACE": "1"}
        self.process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=REPO,
            env={**os.environ, **env, "HF_HUB_OFFLINE": "1"},
        )
        try:
            while self.health() != 200:
                assert self.process.poll() is None, self.log()[-6000:]
                time.sleep(1)
        except BaseException:
            self.process.kill()
            raise

    def log(self):
        """What the server wrote so far."""
        return self._log.read_text()

    def health(self):
        """The status of /health, or None without an answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def complete(self, **fields):
        """The open reply to a request for greedy tokens."""
        fields = {"model": "demo", "temperature": 0, "ignore_eos": True, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=120)


@pytest.fixture(scope="module", params=PARALLEL)
def server(request, nodes, tmp_path_factory):
    nodes.add()
    log = tmp_path_factory.mktemp("ray") / f"{request.param}.log"
    server = Server(nodes.cluster.address, request.param, log)
    yield server
    server.process.terminate()
    server.process.wait(timeout=60)


@pytest.fixture(scope="module")
def in_one_process():
    """The tokens of an engine without Ray, by prompt."""
    (result,) = run(Case(str(MODEL), {"max_model_len": 2048}))
    assert result.error is None
    return [completion.tokens for completion in result.completions]


def test_two_nodes_give_the_tokens_of_one_process(server, in_one_process):
    with server.complete(prompt=PROMPTS, max_tokens=32, return_token_ids=True) as reply:
        choices = json.load(reply)["choices"]
    assert [choice["token_ids"] for choice in choices] == in_one_process


def test_the_server_ends_when_a_node_dies(server, nodes):
    seen = []
    over = threading.Event()

    def watch():
        while not over.wait(0.02):
            seen.append(server.health())

    watcher = threading.Thread(target=watch, daemon=True)
    with server.complete(prompt=[7], max_tokens=2000, stream=True) as stream:
        for _ in range(8):  # two lines a token: it is under way
            assert stream.readline()
        watcher.start()
        killed = time.monotonic()
        nodes.kill()
        rest = stream.read().decode()
    try:
        server.process.wait(timeout=BOUND)
    finally:
        over.set()
        watcher.join()
    took = time.monotonic() - killed

    assert took < BOUND
    assert server.process.returncode == 1
    assert 503 in seen, set(seen)
    events = [json.loads(line[6:]) for line in rest.splitlines() if "error" in line]
    assert [event["error"]["code"] for event in events] == [500], rest[-2000:]
    assert "[1] died unexpectedly" in server.log()
    assert "error: the engine died" in server.log()
