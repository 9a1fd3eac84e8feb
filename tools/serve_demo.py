# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Serves the demo model, and says when it is ready and what to try.

    python -m tools.serve_demo --model examples/demo-glm-dsa-ragged-exl3

The server is vLLM's own OpenAI-compatible one, started as
`python -m vllm.entrypoints.openai.api_server`; it does the work and this waits for it.
"""

import argparse
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

#: The server listens here only: the demo has no authentication.
HOST = "127.0.0.1"
NAME = "demo"
PROMPT = "In the beginning God created"

# One draft token: the demo model has one MTP layer.
SPECULATION = {"method": "mtp", "num_speculative_tokens": 1}

#: What the server is given beside the caller's environment, which comes first.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is half of the memory
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the model is a local folder
}

_POLL_SECONDS = 0.5
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def server_command(model: Path, port: int) -> list[str]:
    """The command that serves a model folder on `HOST` and `port`."""
    return [
        # Upstream means to rename the command; who asks for the demo can't help it.
        *(sys.executable, "-W", "ignore::DeprecationWarning:__main__"),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", NAME),
        *("--host", HOST, "--port", str(port)),
        *("--speculative-config", json.dumps(SPECULATION)),
        *("--disable-access-log-for-endpoints", "/health"),
    ]


def ready_lines(port: int) -> str:
    """What a person is told once the server answers: where, and a line to try."""
    url = f"http://{HOST}:{port}"
    request = {"model": NAME, "prompt": PROMPT, "max_tokens": 40, "seed": 1}
    return (
        f"ready: the demo model answers on {url} (Ctrl-C stops it); try\n"
        f"curl -s {url}/v1/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(request)}'"
    )


def port_problem(port: int) -> str | None:
    """Why the server could not listen on a port, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the server does: a port whose last connections still linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            taken = getattr(error, "errno", None) == errno.EADDRINUSE
            reason = "another program listens there" if taken else str(error)
            return f"port {port}: {reason}; choose another: PORT={port + 1} make serve"
    return None


def model_problem(model: Path) -> str | None:
    """Why a folder is no model to serve, or None."""
    if (model / "config.json").is_file():
        return None
    return f"{model}: has no config.json, so it is no model; MODEL=folder make serve"


def answers(port: int) -> bool:
    """Whether the server says that it is well."""
    # A proxy of the user's environment must not be asked for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{HOST}:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def run_server(
    command: Sequence[str], port: int, environment: Mapping[str, str]
) -> int:
    """Runs a server to its end; prints the ready lines once it answers.

    The server has a process group of its own, so that Ctrl-C reaches it once, from
    here, and not a second time from the terminal.

    Returns:
        The server's exit code; 128 + N where signal N ended it, as a shell says it.
    """
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda sent, _frame: server.send_signal(sent))

    while server.poll() is None:
        if answers(port):
            print(f"\n{ready_lines(port)}\n", flush=True)
            break
        time.sleep(_POLL_SECONDS)
    else:
        print("error: the server ended before it was ready; see above", file=sys.stderr)
    code = server.wait()
    return code if code >= 0 else 128 - code


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the model and the port, then serves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--port", type=int, default=8000, help=f"on {HOST}")
    options = parser.parse_args(arguments)

    problem = model_problem(options.model) or port_problem(options.port)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    command = server_command(options.model, options.port)
    return run_server(command, options.port, {**ENVIRONMENT, **os.environ})


if __name__ == "__main__":
    sys.exit(main())
