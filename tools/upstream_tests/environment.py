# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Makes what the runs need: a stock vLLM to compare with, and pytest for both.

The fork's environment is used as it is: pytest and the other test-only packages lie
in a folder of their own, which both interpreters read.
"""

import subprocess
import sys
from pathlib import Path

from tools.fork.errors import ForkError
from tools.fork.metadata import read_metadata
from tools.fork.pins import Pins, select_machine
from tools.fork.wheel import obtain_wheel

REQUIREMENTS_FILE = Path(__file__).with_name("requirements.txt")


def make_stock(folder: Path, pins: Pins) -> Path:
    """Installs the pinned upstream wheel, unchanged, into an environment of its own.

    Its requirements are those that the fork states, so that both stand on the same.

    Args:
        folder: The environment; one that is there and up to date is kept.
        pins: Which wheel.

    Returns:
        The environment's interpreter.

    Raises:
        ForkError: The wheel can't be had, or pip can't install.
    """
    pin = pins.wheel("cpu", select_machine())
    wheel = obtain_wheel(pin, pins.version)
    requirements = "\n".join(read_metadata(wheel, pins).requirements)
    python = folder / "bin" / "python"
    recipe = f"{pin.sha256}\n{sys.version}\n{requirements}\n"
    if _is_made(folder, recipe):
        return python
    print(f"making the stock environment {folder}", file=sys.stderr, flush=True)
    _call([sys.executable, "-m", "venv", "--clear", str(folder)])
    listed = folder / "requirements.txt"
    listed.write_text(requirements, encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
    _call([*pip, "--requirement", str(listed)])
    _call([*pip, "--no-deps", str(wheel)])
    _mark_made(folder, recipe)
    return python


def make_extras(folder: Path) -> Path:
    """Installs the test-only packages into `folder`, and returns it.

    Raises:
        ForkError: pip can't install.
    """
    recipe = REQUIREMENTS_FILE.read_text(encoding="utf-8")
    if not _is_made(folder, recipe):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input"]
        # vLLM's own environment has what these depend on.
        pip += ["--no-deps", "--upgrade", "--target", str(folder)]
        _call([*pip, "--requirement", str(REQUIREMENTS_FILE)])
        _mark_made(folder, recipe)
    return folder


def _is_made(folder: Path, recipe: str) -> bool:
    """Whether `folder` was made, to its end, by this recipe."""
    made = folder / "made-by.txt"
    return made.exists() and made.read_text(encoding="utf-8") == recipe


def _mark_made(folder: Path, recipe: str) -> None:
    (folder / "made-by.txt").write_text(recipe, encoding="utf-8")


def _call(command: list[str]) -> None:
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        said = [line for line in answer.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")]
        reason = (errors or said or [f"exit status {answer.returncode}"])[-1]
        raise ForkError(f"{' '.join(command[1:4])} failed: {reason}")
