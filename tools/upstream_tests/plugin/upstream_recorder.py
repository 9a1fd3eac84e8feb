# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Pytest plugin that writes each event of a run to a file as it happens.

It runs inside the interpreter under test, so it needs pytest alone. One JSON object
a line, flushed at once: when the process dies, what was reported before is kept and
the last ``start`` names the test that killed it.

Environment:
    UPSTREAM_RECORDER_LOG: file to append the events to.
    UPSTREAM_RECORDER_DONE: file with the node ids to leave out, one a line: those
        that an earlier process of the same run has already answered.
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest


class Recorder:
    """Appends events to the log of the process that was started to run tests."""

    def __init__(self, log: Path, done: frozenset[str]) -> None:
        self._file = log.open("a", encoding="utf-8")
        self._done = done
        # A test may fork; the child inherits this object and must stay silent.
        self._pid = os.getpid()

    def _write(self, **event: Any) -> None:
        if os.getpid() == self._pid:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Names the file, in case importing it kills the process."""
        if isinstance(collector, pytest.Module):
            self._write(event="start", id=collector.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected is a result under its path."""
        if report.outcome != "passed":
            self._write(
                event="result",
                id=report.nodeid,
                outcome="error" if report.failed else "skipped",
                reason=_reason(report.longrepr),
            )

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves out what is answered already."""
        left_out = [item for item in items if item.nodeid in self._done]
        if left_out:
            items[:] = [item for item in items if item.nodeid not in self._done]
            config.hook.pytest_deselected(items=left_out)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Names what is going to run, and makes its clean-up cheap."""
        self._write(event="collected", ids=[item.nodeid for item in session.items])
        # Upstream's conftest unfreezes and collects garbage after every test. Walking
        # what the imports made takes 0.4 s each time, more than most tests.
        gc.freeze()
        pytest.MonkeyPatch().setattr(gc, "unfreeze", lambda: None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        """Names the test, in case it kills the process."""
        self._write(event="start", id=item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The call counts, and a set-up or teardown that does not pass."""
        if report.when != "call" and report.outcome == "passed":
            return
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if report.passed else "xfailed"
        elif report.failed and report.when != "call":
            outcome = "error"
        self._write(
            event="result",
            id=report.nodeid,
            outcome=outcome,
            reason=_reason(report.longrepr),
            seconds=round(report.duration, 2),
        )

    def pytest_sessionfinish(self) -> None:
        """Says that the process came to its end."""
        self._write(event="finish")


def _reason(longrepr: Any) -> str:
    """Why a test didn't pass, on one line; empty for one that did."""
    if not longrepr:
        return ""
    if isinstance(longrepr, tuple):  # a skip: (path, line, reason)
        text = str(longrepr[2])
    else:
        crash = getattr(longrepr, "reprcrash", None)
        # A collection error has no crash entry; its last line names the exception.
        text = crash.message if crash else str(longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:300]


def pytest_configure(config: pytest.Config) -> None:
    """Starts recording."""
    done_file = Path(os.environ["UPSTREAM_RECORDER_DONE"])
    done = frozenset(done_file.read_text(encoding="utf-8").splitlines())
    recorder = Recorder(Path(os.environ["UPSTREAM_RECORDER_LOG"]), done)
    config.pluginmanager.register(recorder, "upstream-recorder")
    vllm = importlib.import_module("vllm")
    recorder._write(
        event="environment",
        vllm=vllm.__version__,
        path=vllm.__path__[0],
        python=".".join(map(str, sys.version_info[:3])),
    )
