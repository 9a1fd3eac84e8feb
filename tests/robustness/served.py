# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A server of the demo model, as a person runs it, and what it can be asked."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress

import psutil

from tests.serving.generate import REPO, free_port

MODEL = REPO / "examples" / "demo-glm-dsa-ragged-exl3"
CONTEXT = 2048
#: Blocks of 16 tokens: room for one request of the longest kind and for some short
#: ones, so that a crowd has to wait and to be preempted. Also, every block is used
#: soon, and memory that was only promised before cannot be taken for a leak.
BLOCKS = 512
OPTIONS = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT)),
    *("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "32"),
    *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'),
    *("--served-model-name", "demo", "--host", "127.0.0.1"),
    *("--shutdown-timeout", "120"),
]
#: So that resident memory is what the server holds. By default oneDNN keeps its last
#: 1,024 kernels, one for every shape, and malloc what is free between large blocks.
MEASURABLE = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 16),
}
#: What is asked before and after an ordeal. The first is as short, the last as long as
#: ever; greedy tokens of the demo model lead by far.
FIXED = ["I", "In the beginning God created", "And it came to pass, that " * 60]


class Server:
    """A server of a copy of the demo model."""

    def __init__(self, folder, *options):
        self.model = folder / "model"
        shutil.copytree(MODEL, self.model)
        self._log = folder / "log"
        self._seen = []
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--port", str(port)]
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *OPTIONS, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPO,
                env={**os.environ, **MEASURABLE, **env},
            )
        try:
            while self.health() != 200:
                assert self.process.poll() is None, self.log()[-6000:]
                time.sleep(0.5)
            self.processes()
        except BaseException:
            self.kill()
            raise

    def log(self):
        """What the server wrote so far."""
        return self._log.read_text(errors="replace")

    def processes(self):
        """The server's process, its engine's and its workers'."""
        self._seen = self._alive()
        return [
            process
            for process in self._seen
            # Python's own, which counts what is shared and goes last.
            if "resource_tracker" not in " ".join(process.cmdline())
        ]

    def named(self, title):
        """The one process whose title holds a word, as `ps` shows it."""
        found = [p for p in self.processes() if title in " ".join(p.cmdline())]
        # A child has its parent's title until it is another program.
        (first,) = [p for p in found if p.parent() not in found]
        return first

    def health(self):
        """The status of /health, or None without an answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def metric(self, name):
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        values = re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, name
        return sum(map(float, values))

    def open(self, **fields):
        """The open reply to a request for greedy tokens."""
        fields = {"model": "demo", "temperature": 0, "ignore_eos": True, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=300)

    def tokens(self):
        """The tokens after each of the fixed prompts."""
        with self.open(prompt=FIXED, max_tokens=32, return_token_ids=True) as reply:
            choices = json.load(reply)["choices"]
        return [choice["token_ids"] for choice in choices]

    def wait_until_idle(self, seconds):
        """Waits until no request is running or waiting.

        Raises:
            AssertionError: Some are, after so many seconds.
        """
        until = time.monotonic() + seconds
        names = ["num_requests_running", "num_requests_waiting"]
        while any(left := [self.metric(name) for name in names]):
            assert time.monotonic() < until, f"{left} requests running and waiting"
            time.sleep(0.2)

    def kill(self):
        """Ends whatever is left of the server, also if its first process is gone."""
        for process in {*self._seen, *self._alive()}:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def _alive(self):
        """The server's process and its children, none if it is gone."""
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.process.pid)
            return [server, *server.children(recursive=True)]
        return []


def events(lines):
    """The events of a stream, but for the last one, which must say that it is over."""
    data = [line[6:] for line in lines.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]", lines[-2000:]
    return [json.loads(event) for event in data[:-1]]
