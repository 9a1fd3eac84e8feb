# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs the commands of docs/tutorial.md and writes their output back into it.

    .venv/bin/python -m tools.tutorial

A line of a `console` block that begins with `$ ` is a command, and so is what it
continues on after a backslash. What follows, up to the next one, is replaced by what it
printed. The commands run in the repository; what they make goes to build/tutorial,
which is emptied first, and plots to docs/tutorial.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "tutorial.md"
#: Where the commands write, as the page spells it.
WORK, PLOTS = "build/tutorial", "docs/tutorial"

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIMES = re.compile(r"(?<=<!-- times -->\n).*?(?=<!-- end of times -->)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command of the page."""

    shown: str  # as the page shows it, with `$ ` and line breaks

    @property
    def line(self) -> str:
        """As a shell takes it."""
        return self.shown.removeprefix("$ ")

    @property
    def name(self) -> str:
        """Such as `exl3 prune`."""
        return " ".join(self.line.split()[:2])

    def run(
        self, more: str = "", *, work: str = WORK, plots: str = PLOTS
    ) -> subprocess.CompletedProcess[str]:
        """Runs it in the repository, with this interpreter's programs.

        Args:
            more: Options to add.
            work: Where it writes, if not where the page says.
            plots: The same of plots.
        """
        line = self.line.replace(WORK, work).replace(PLOTS, plots)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["sh", "-c", f"{line} {more}"],
            capture_output=True,
            text=True,
            cwd=REPO,
            env={**os.environ, "PATH": path},
            check=False,
        )


def commands(text: str) -> Iterator[Command]:
    """The commands of a page, in order."""
    for block in _BLOCK.findall(text):
        yield from _commands_of(block)


def _commands_of(block: str) -> Iterator[Command]:
    lines = iter(block.splitlines())
    for line in lines:
        if line.startswith("$ "):
            while line.endswith("\\"):
                line += "\n" + next(lines)
            yield Command(line)


def fill_in(text: str) -> str:
    """The page with the output of its commands, which run now, and their times.

    Raises:
        SystemExit: One failed; says which, and what it wrote.
    """
    times = []

    def with_output(block: re.Match[str]) -> str:
        parts = []
        for command in _commands_of(block[1]):
            print(command.shown, flush=True)
            started = time.monotonic()
            done = command.run()
            times.append((command.name, time.monotonic() - started))
            if done.returncode:
                raise SystemExit(f"{done.stdout}{done.stderr}\nfailed: {command.line}")
            parts.append(f"{command.shown}\n{done.stdout.rstrip()}".rstrip())
        return "```console\n" + "\n\n".join(parts) + "\n```"

    filled = _BLOCK.sub(with_output, text)
    rows = [f"| `{name}` | {seconds:.0f} |\n" for name, seconds in times]
    total = sum(seconds for _, seconds in times)
    table = ["| command | seconds |\n", "| --- | --- |\n", *rows]
    return _TIMES.sub("".join([*table, f"| all | {total:.0f} |\n"]), filled)


def main() -> None:
    """Makes the page's output anew."""
    shutil.rmtree(REPO / WORK, ignore_errors=True)
    (REPO / WORK).mkdir(parents=True)
    (REPO / PLOTS).mkdir(exist_ok=True)
    PAGE.write_text(fill_in(PAGE.read_text()))


if __name__ == "__main__":
    main()
