# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a user can mend is one line that names the file, and an exit code."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exl3 import cli
from exl3.format.errors import FileError
from exl3.tools.shared.errors import ToolError

DEMO = Path(__file__).parents[2] / "examples/demo-glm-dsa-exl3"


class Command:
    """A command that returns what it is given, or raises it."""

    def __init__(self, outcome, has_resume=False):
        self.outcome = outcome
        self.has_resume = has_resume

    def add_command(self, commands):
        parser = commands.add_parser("do")
        if self.has_resume:
            parser.add_argument("--resume", action="store_true")
        parser.set_defaults(run=self.run)

    def run(self, options):
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def run(monkeypatch, *command):
    monkeypatch.setattr(cli, "COMMANDS", (Command(*command),))
    return cli.main(["do"])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileError("a.json: is bad; fetch it"), "a.json: is bad; fetch it"),
        (ToolError("--bits 9: too many; use 8"), "--bits 9: too many; use 8"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/out/a"),
            "/out/a: No space left on device; free some space, and run it again",
        ),
        (
            OSError(errno.EFBIG, os.strerror(errno.EFBIG), "a"),
            (
                "a: File too large; raise the limit on a file's size (ulimit -f), and "
                "run it again"
            ),
        ),
        (
            OSError(errno.EROFS, os.strerror(errno.EROFS), "b", None, "a"),
            "a: Read-only file system; write to another file system",
        ),
        (
            OSError(errno.EACCES, os.strerror(errno.EACCES), "a"),
            "a: Permission denied; change its permissions, or name another place",
        ),
        (
            OSError(errno.EIO, os.strerror(errno.EIO), "a"),
            "a: Input/output error",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "output: No space left on device; free some space, and run it again",
        ),
        (OSError("no\nhub"), "no hub"),
    ],
)
def test_one_line_and_exit_code_1(error, line, monkeypatch, capsys):
    assert run(monkeypatch, error) == 1
    assert capsys.readouterr().err == f"exl3: {line}\n"


def test_ctrl_c_is_one_line_and_130(monkeypatch, capsys):
    assert run(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "exl3: stopped\n"


def test_ctrl_c_tells_of_resume_where_there_is_one(monkeypatch, capsys):
    assert run(monkeypatch, KeyboardInterrupt(), True) == 130
    assert capsys.readouterr().err == "exl3: stopped; --resume goes on from here\n"


@pytest.mark.parametrize(("outcome", "code"), [(None, 0), (0, 0), (3, 3)])
def test_the_commands_own_code_is_the_exit_code(outcome, code, monkeypatch):
    assert run(monkeypatch, outcome) == code


def test_a_full_disk_behind_stdout_is_told():
    code = "import sys; from exl3.cli import main; sys.exit(main())"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "inspect", str(DEMO)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("exl3: output: No space left on device; ")
    assert done.stderr.count("\n") == 1
