# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A stand-in for the hub: the routes that a reader of headers asks for, on localhost.

with Hub({"org/name": folder}) as hub:
    run(..., env={"HF_ENDPOINT": hub.url})
assert hub.sent < 1_000_000
"""

import json
import re
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: At most so much is sent of a body that was not asked to be a range.
_CHUNK = 64 * 1024


class Hub:
    """Serves models from folders.

    Args:
        models: Folders by id.
        ranges: Whether ranges are honoured.
    """

    def __init__(self, models: Mapping[str, Path], ranges: bool = True):
        self.models = models
        self.ranges = ranges
        self.requests: list[str] = []  # method, path and range
        self.sent = 0  # bytes of bodies of files
        self.extra_files: list[dict[str, Any]] = []  # that the listing claims
        self._lock = Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        with self._lock:
            self.requests.append(f"{path} {request.headers.get('Range', '')}".strip())
        listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        if listed is not None:
            self._list(request, listed[1], listed[2])
            return
        file = re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/([^/]+)", path)
        found = self.models[file[1]] / file[2] if file else None
        if found is None or not found.is_file():
            _send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        self._send_file(request, found)

    def _list(
        self, request: BaseHTTPRequestHandler, repo: str, revision: str | None
    ) -> None:
        if repo not in self.models:
            _send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        if revision not in (None, "main", "v1", COMMIT):
            _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        files = [
            {"rfilename": path.name, "size": path.stat().st_size}
            for path in sorted(self.models[repo].iterdir())
        ]
        content = {"id": repo, "sha": COMMIT, "siblings": files + self.extra_files}
        _send(request, 200, json.dumps(content).encode())

    def _send_file(self, request: BaseHTTPRequestHandler, path: Path) -> None:
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        begin, end = 0, size
        if asked is not None and self.ranges:
            begin, end = int(asked[1]), min(size, int(asked[2]) + 1)
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        else:
            request.send_response(200)
        request.send_header("Content-Length", str(end - begin))
        request.end_headers()
        with path.open("rb") as stream:
            stream.seek(begin)
            while begin < end:
                chunk = stream.read(min(_CHUNK, end - begin))
                try:
                    request.wfile.write(chunk)
                except OSError:  # the reader has what it wanted
                    return
                begin += len(chunk)
                with self._lock:
                    self.sent += len(chunk)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a reader may leave
            super().handle_error(*arguments)


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: Mapping[str, str] | None = None,
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)
