# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs a group of upstream's tests in one interpreter and says what each gave.

A group is one pytest process, since importing vLLM costs more than most files. A test
that kills the process or outlasts its limit is recorded as such, and a new process
goes on with the rest.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.fork.errors import ForkError

_PLUGIN_DIR = Path(__file__).parent / "plugin"
_POLL_SECONDS = 0.2
# Importing the heaviest test module takes 20 s on a slow core.
_START_LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Result:
    """What one test gave in one interpreter.

    Attributes:
        outcome: pytest's word (``passed``, ``failed``, ``error``, ``skipped``,
            ``xfailed``, ``xpassed``), or ``crashed``, ``timed out``, ``not run``.
        reason: Why it didn't pass, on one line; may be empty.
        seconds: Run time; 0 where it never ended.
    """

    outcome: str
    reason: str = ""
    seconds: float = 0.0


@dataclass
class Run:
    """All results of one interpreter.

    Attributes:
        vllm: Version that the interpreter's vLLM states.
        path: Folder of that vLLM.
        python: Version of the interpreter.
        seconds: Time that the groups took.
        results: By node id; a file that can't be collected has its path as id.
    """

    vllm: str = ""
    path: str = ""
    python: str = ""
    seconds: float = 0.0
    results: dict[str, Result] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Writes the run as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Reads what `save` wrote.

        Raises:
            ForkError: The file can't be read, or isn't such a file.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            results = {k: Result(**v) for k, v in fields.pop("results").items()}
            return cls(**fields, results=results)
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ForkError(
                f"{path}: not a result file of this tool ({error}): make it anew"
            ) from error


@dataclass(frozen=True)
class Interpreter:
    """An interpreter under test and what its tests may see.

    Attributes:
        python: Path of the interpreter.
        extras: Folder with pytest and the other test-only packages.
        tests_root: Folder that holds upstream's ``tests/``.
        work_dir: Folder for logs and caches of this interpreter.
    """

    python: Path
    extras: Path
    tests_root: Path
    work_dir: Path

    def environment(self) -> dict[str, str]:
        """The environment of a run: offline, on the CPU, with caches of its own."""
        # Settings of the caller's vLLM must not change what upstream's tests see.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        return kept | {
            "PYTHONPATH": os.pathsep.join([str(_PLUGIN_DIR), str(self.extras)]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.work_dir / "hf"),
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CACHE_ROOT": str(self.work_dir / "cache"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }


def run_group(
    interpreter: Interpreter,
    name: str,
    arguments: Sequence[str],
    limit_seconds: float,
    run: Run,
) -> dict[str, Result]:
    """Runs `arguments` (files, node ids, ``--deselect``) and adds to `run`.

    Args:
        interpreter: Where to run.
        name: Group name; the output goes to ``work_dir/NAME.log``.
        arguments: pytest's arguments.
        limit_seconds: Limit of one test, in seconds.
        run: Takes the results and the interpreter's facts.

    Returns:
        The group's results, by node id.
    """
    interpreter.work_dir.mkdir(parents=True, exist_ok=True)
    log = interpreter.work_dir / f"{name}.log"
    log.unlink(missing_ok=True)
    results: dict[str, Result] = {}
    while True:
        done = frozenset(results)
        # A file that couldn't be collected is its own result and isn't tried again.
        wanted = [word for word in arguments if word.split("::")[0] not in done]
        if all(word.startswith("--") for word in wanted):
            break  # without a file, pytest would run whatever it finds
        events, timed_out = _run_process(interpreter, log, wanted, limit_seconds, done)
        in_flight, remaining, finished = _read(events, results, run)
        if finished:
            break
        if in_flight is None or in_flight in done:
            # Died outside a test: another process would die there again.
            for node_id in remaining or [name]:
                results[node_id] = Result("not run", f"the process ended, see {log}")
            break
        results[in_flight] = (
            Result("timed out", f"no end within {limit_seconds:.0f} s")
            if timed_out
            else Result("crashed", f"the process died, see {log.name}")
        )
    run.results.update(results)
    return results


def _run_process(
    interpreter: Interpreter,
    log: Path,
    arguments: Sequence[str],
    limit_seconds: float,
    done: Iterable[str],
) -> tuple[list[dict[str, Any]], bool]:
    """Starts one pytest process and watches it.

    Returns:
        Its events, and whether it was ended because a test outlasted the limit.
    """
    with tempfile.TemporaryDirectory() as scratch:
        events = Path(scratch, "events")
        events.touch()
        done_file = Path(scratch, "done")
        done_file.write_text("\n".join(done), encoding="utf-8")
        environment = interpreter.environment() | {
            "UPSTREAM_RECORDER_LOG": str(events),
            "UPSTREAM_RECORDER_DONE": str(done_file),
        }
        command = [str(interpreter.python), "-m", "pytest", "-p", "upstream_recorder"]
        command += [
            "-p",
            "pytest_asyncio.plugin",
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=short",
        ]
        command += ["--continue-on-collection-errors", *arguments]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=interpreter.tests_root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            timed_out = _wait(process, events, limit_seconds)
        finally:
            # Also ends the engine processes that a test left behind.
            _end_session(process)
        lines = events.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], timed_out


def _wait(process: subprocess.Popen[bytes], events: Path, limit_seconds: float) -> bool:
    """Waits for the process; True when it stood still longer than the limit."""
    size, since, limit = 0, time.monotonic(), _START_LIMIT_SECONDS
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        now = events.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
            if limit != limit_seconds and '"collected"' in events.read_text("utf-8"):
                limit = limit_seconds
        elif time.monotonic() - since > limit:
            return True
    return False


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kills whatever is left of the session that the process leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(
    events: Sequence[dict[str, Any]], results: dict[str, Result], run: Run
) -> tuple[str | None, list[str], bool]:
    """Adds a process's events to the results.

    Returns:
        The test (or file) that was started last, the collected tests without a
        result, and whether the process came to its end.
    """
    in_flight: str | None = None
    collected: list[str] = []
    finished = False
    for event in events:
        match event["event"]:
            case "environment":
                run.vllm, run.path = event["vllm"], event["path"]
                run.python = event["python"]
            case "start":
                in_flight = event["id"]
            case "collected":
                collected, in_flight = event["ids"], None
            case "result":
                result = Result(
                    event["outcome"], event["reason"], event.get("seconds", 0.0)
                )
                # A failing teardown comes after the call's own result and counts.
                if result.outcome != "passed" or event["id"] not in results:
                    results[event["id"]] = result
            case "finish":
                finished = True
    remaining = [node_id for node_id in collected if node_id not in results]
    return in_flight, remaining, finished
