# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`make serve` says when the server is ready, and lets it end as it will.

A small HTTP server stands for vLLM's.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools import serve_demo

# Answers /health, counts the signals that reach it, and leaves by code 7.
SERVER = """
import http.server, signal, sys, threading

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass

got = []
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
def stop(number, _frame):
    got.append(signal.Signals(number).name)
    threading.Timer(0.3, server.shutdown).start()  # a second signal would be seen
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, stop)
server.serve_forever()
print("signals:", *got, flush=True)
sys.exit(7)
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((serve_demo.HOST, 0))
        return probe.getsockname()[1]


def start(server: list[str], port: int) -> subprocess.Popen:
    """`run_server` with a stand-in server, in a process of its own."""
    script = (
        "import os, sys; from tools.serve_demo import run_server;"
        f"sys.exit(run_server({server!r}, {port}, os.environ))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A proxy that answers nothing must not come between.
        env={**os.environ, "http_proxy": "http://127.0.0.1:9"},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_reaches_the_server_once_and_its_code_comes_back(port, number):
    process = start([sys.executable, "-c", SERVER, str(port)], port)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("ready:"):
        assert process.poll() is None
    # To the whole group, as a terminal's Ctrl-C is.
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert f"signals: {number.name}\n" in out
    assert (process.returncode, err) == (7, "")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ],
)
def test_server_that_never_gets_ready(port, script, code):
    process = start([sys.executable, "-c", script], port)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "ready" not in out
    assert err == "error: the server ended before it was ready; see above\n"


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def no_server(monkeypatch):
    """Fails a test that starts a server."""
    monkeypatch.setattr(serve_demo, "run_server", lambda *_: pytest.fail("started"))


@pytest.mark.usefixtures("no_server")
def test_port_that_is_taken_is_said_in_one_line(model, port, capsys):
    with socket.socket() as other:
        other.bind((serve_demo.HOST, port))
        other.listen()
        code = serve_demo.main(["--model", str(model), "--port", str(port)])
    assert code == 1
    assert capsys.readouterr().err == (
        f"error: port {port}: another program listens there; choose another: "
        f"PORT={port + 1} make serve\n"
    )


@pytest.mark.usefixtures("no_server")
def test_port_that_does_not_exist(model, capsys):
    assert serve_demo.main(["--model", str(model), "--port", "70000"]) == 1
    assert capsys.readouterr().err.startswith("error: port 70000: ")


@pytest.mark.usefixtures("no_server")
def test_folder_without_a_model(tmp_path, capsys):
    assert serve_demo.main(["--model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: has no config.json")


def test_environment_of_the_caller_comes_first(model, port, monkeypatch):
    given = {}
    monkeypatch.setattr(
        serve_demo, "run_server", lambda command, port, env: given.update(env) or 0
    )
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert serve_demo.main(["--model", str(model), "--port", str(port)]) == 0
    assert given["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert given["HF_HUB_OFFLINE"] == "1"


def test_server_drafts_with_the_mtp_layer():
    command = serve_demo.server_command(Path("folder"), 8123)
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["-m"] == "vllm.entrypoints.openai.api_server"
    assert options["--model"] == "folder"
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "8123")
    assert json.loads(options["--speculative-config"])["method"] == "mtp"


def test_line_to_try_is_one_a_shell_takes():
    line = serve_demo.ready_lines(8123).splitlines()[-1]
    words = shlex.split(line)
    assert words[0] == "curl"
    assert "http://127.0.0.1:8123/v1/completions" in words
    request = json.loads(words[words.index("-d") + 1])
    assert (request["model"], request["seed"]) == (serve_demo.NAME, 1)
