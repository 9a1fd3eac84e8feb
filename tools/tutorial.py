# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs the commands of docs/tutorial.md and writes their output back into it.

    .venv/bin/python -m tools.tutorial [--first N]

A line of a `console` block that begins with `$ ` is a command, and so is what it
continues on after a backslash. What follows, up to the next one, is replaced by what it
printed. The commands run in the repository; what they make goes to build/tutorial,
which is emptied first, and plots to docs/tutorial. The page is written after each
command. Where one fails, mend it, and go on with `--first` and its number.
"""

import argparse
import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "tutorial.md"
#: Where the commands write, as the page spells it.
WORK, PLOTS = "build/tutorial", "docs/tutorial"

_BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
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


def commands(text: str) -> list[Command]:
    """The commands of a page, in order."""
    return [command for block in _BLOCK.findall(text) for command, _ in _parse(block)]


def _parse(block: str) -> list[tuple[Command, str]]:
    """The commands of a block, each with the output below it."""
    found: list[tuple[Command, str]] = []
    lines = iter(block.splitlines(keepends=True))
    for line in lines:
        if line.startswith("$ "):
            while line.endswith("\\\n"):
                line += next(lines)
            found.append((Command(line.strip()), ""))
        elif found:
            command, output = found.pop()
            found.append((command, output + line))
    return found


def fill_in(text: str, number: int, output: str) -> str:
    """The page with other output below one of its commands.

    Args:
        text: The page.
        number: Of the command, from 1.
        output: What it printed.
    """
    numbers = itertools.count(1)

    def replace(block: re.Match[str]) -> str:
        parts = [
            f"{command.shown}\n{output if next(numbers) == number else old}".strip()
            for command, old in _parse(block[0])
        ]
        return "\n\n".join(parts) + "\n"

    return _BLOCK.sub(replace, text)


def note_time(text: str, number: int, name: str, wall: float, cpu: float) -> str:
    """The page with a command's row in the table of times, the last one so far."""
    table = _TIMES.search(text)
    assert table is not None, "the page has no table of times"
    rows = table[0].splitlines()[2:][: number - 1]
    rows.append(f"| {number} | `{name}` | {wall:.0f} | {cpu:.0f} |")
    head = ["| | command | seconds | of CPU time |", "| --- | --- | --- | --- |"]
    return _TIMES.sub("\n".join([*head, *rows]) + "\n", text)


def _cpu_seconds() -> float:
    """CPU time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Makes the page's output anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=1, metavar="N")
    first = parser.parse_args().first
    if first == 1:
        shutil.rmtree(REPO / WORK, ignore_errors=True)
    (REPO / WORK).mkdir(parents=True, exist_ok=True)
    (REPO / PLOTS).mkdir(exist_ok=True)
    listed = commands(PAGE.read_text())
    for number, command in list(enumerate(listed, 1))[first - 1 :]:
        print(f"[{number}] {command.line}", flush=True)
        started, used = time.monotonic(), _cpu_seconds()
        done = command.run()
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}\n[{number}] failed")
        times = time.monotonic() - started, _cpu_seconds() - used
        text = fill_in(PAGE.read_text(), number, done.stdout)
        PAGE.write_text(note_time(text, number, command.name, *times))


if __name__ == "__main__":
    main()
