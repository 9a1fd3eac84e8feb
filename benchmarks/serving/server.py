# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The server that is measured: one that runs, or one started for it."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.metrics import Sample, parse

# A proxy of the user's environment must not be asked for a server of this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_POLL_SECONDS = 1.0


class BenchmarkError(Exception):
    """Nothing can be measured; the message says in one line why."""


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: Without a path.
        model: The name that requests have to give.
        root: What it was loaded from, a folder or a repository of the hub.
        max_model_len: Most tokens of a prompt and its answer together.
        version: vLLM's.
    """

    url: str
    model: str
    root: str
    max_model_len: int
    version: str

    @classmethod
    def at(cls, url: str) -> "Server":
        """The server that runs at a URL.

        Raises:
            BenchmarkError: None does, or it is none of vLLM's.
        """
        url = url.rstrip("/")
        try:
            (model, *_) = _json(f"{url}/v1/models")["data"]
            version = _json(f"{url}/version")["version"]
            return cls(url, model["id"], model["root"], model["max_model_len"], version)
        except (OSError, ValueError, KeyError) as error:
            raise BenchmarkError(f"{url}: no vLLM server answers: {error}") from error

    def metrics(self) -> list[Sample]:
        """What it says of itself."""
        return parse(_text(f"{self.url}/metrics"))


@contextmanager
def started(model: str, options: Sequence[str], log: Path) -> Iterator[Server]:
    """A server of a model, which is stopped afterwards.

    Args:
        model: A folder or a repository of the hub.
        options: More words for `vllm serve`.
        log: The file for what it writes.

    Raises:
        BenchmarkError: It ended before it answered.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--host", "127.0.0.1", "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        while not _well(url):
            if process.poll() is not None:
                lines = log.read_text(errors="replace").strip().splitlines() or [""]
                raise BenchmarkError(f"the server ended: {lines[-1]} (all in {log})")
            time.sleep(_POLL_SECONDS)
        yield Server.at(url)
    finally:
        process.terminate()
        process.wait()


def _well(url: str) -> bool:
    try:
        _text(f"{url}/health")
    except OSError:
        return False
    return True


def _text(url: str) -> str:
    with _OPENER.open(url, timeout=60) as reply:
        return reply.read().decode()


def _json(url: str) -> Any:
    return json.loads(_text(url))
