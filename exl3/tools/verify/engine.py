# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Starts an engine in a process of its own, and asks it.

Its memory, and whatever it writes, go with the process: the next engine starts on a
free machine, and the lines of the checks stay readable.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from exl3.tools.shared.errors import ToolError
from exl3.tools.verify.questions import Answers, Completion, Prefill, Questions


class EngineError(Exception):
    """The engine did not answer. The message is one line that says why."""


def check_installed() -> None:
    """Checks that there is an engine to ask.

    Raises:
        ToolError: vLLM is not installed, or it is not this fork of it.
    """
    # A folder of that name somewhere on the path has no origin.
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ToolError(
            "verify boots the engine, but vLLM is not installed beside exl3; build the "
            "fork with VLLM_TARGET_DEVICE=cpu or cuda"
        )
    if not (Path(spec.origin).parent / "refusal.py").exists():
        raise ToolError(
            f"verify boots the engine, but the vLLM in {Path(spec.origin).parent} is "
            "not vLLM Hetero; install the fork in its place"
        )


def ask(questions: Questions) -> Answers:
    """Boots an engine and asks it; it is gone when this returns.

    Raises:
        EngineError: It refused, or died. Unless it refused, the line names its log,
            which then is kept.
    """
    with tempfile.TemporaryDirectory(prefix="exl3-verify-") as folder:
        asked, answered = Path(folder) / "questions.json", Path(folder) / "answers.json"
        log = Path(folder) / "engine.log"
        asked.write_text(json.dumps(asdict(questions)))
        with log.open("w") as stream:
            # -P: a folder that the user happens to be in must not shadow a package.
            command = [sys.executable, "-P", "-m", "exl3.tools.verify.worker"]
            done = subprocess.run(
                [*command, str(asked), str(answered)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=_environment(),
                check=False,
            )
        if not answered.exists():
            raise EngineError(f"{_death(done.returncode)}; its log: {_keep(log)}")
        reply = json.loads(answered.read_text())
        if "answers" not in reply:
            if reply["refusal"]:
                raise EngineError(reply["refusal"])
            raise EngineError(f"{reply['error']}; its log: {_keep(log)}")
    fields = reply["answers"]
    fields["prefills"] = [Prefill(**prefill) for prefill in fields["prefills"]]
    fields["completions"] = [Completion(**each) for each in fields["completions"]]
    return Answers(**fields)


def _keep(log: Path) -> str:
    """Moves a log to where it outlives the command."""
    descriptor, kept = tempfile.mkstemp(prefix="exl3-verify-", suffix=".log")
    os.close(descriptor)
    return shutil.move(log, kept)


def _environment() -> dict[str, str]:
    """The user's environment, and defaults that fit a short visit."""
    return {
        # Without a second process the engine starts faster, and its errors arrive.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        **os.environ,
    }


def _death(code: int) -> str:
    """How a process ended that left no answer."""
    if code >= 0:
        return f"the engine ended with exit code {code}"
    how = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if how == "SIGKILL" else ""
    return f"the engine was ended by {how}{hint}"
