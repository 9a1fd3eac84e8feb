# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Stops a command that makes a checkpoint from another, at any moment and by any cause.

    hazards = Hazards(lambda source, out: ["prune", source, out, ...], source, tmp_path)
    hazards.check_kills(20)
    hazards.check_refusals()

The command must write through `StagedCheckpoint` and have `--resume`. Every run is a
process of its own, so that it can be killed. What must hold: the destination is not
there, or is whole; `--resume` finishes; the result has the same bytes as one that
nobody stopped.
"""

import ctypes
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from exl3 import cli

#: Processes are forked from one that has imported what takes long, and has no threads.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["torch", "safetensors.torch", "transformers", "exl3.cli", __name__]
)
#: linux/capability.h: what lets root write where it may not.
_CAP_DAC_OVERRIDE = 1
_CAPABILITY_VERSION_3 = 0x20080522

Main = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Ended:
    """What a process left: its exit code (negative: a signal) and what it said."""

    code: int
    error: str


class Hazards:
    """One command, and what may happen to it.

    Args:
        command: The arguments of `exl3` for a source and a destination, without
            `--resume`.
        source: A checkpoint that the command accepts.
        folder: An empty folder to work in.
        main: What the arguments are given to, a function of a module.
    """

    def __init__(
        self,
        command: Callable[[Path, Path], Sequence[str | Path]],
        source: Path,
        folder: Path,
        main: Main = cli.main,
    ):
        self.command = command
        self.source = source
        self.folder = folder
        self.out = folder / "out"
        self.partial = folder / ".out.partial"
        self._main = main

    @cached_property
    def whole(self) -> dict[str, bytes]:
        """What the command writes when nobody stops it."""
        out = self.folder / "whole"
        Run(_nothing, []).end()  # the first process waits for the imports
        start = time.monotonic()
        done = self.run(self.source, out)
        self.seconds = time.monotonic() - start
        assert done.code == 0, done.error
        return contents(out)

    def run(self, source: Path, out: Path, *more: str, **limits) -> Ended:
        """Runs the command to its end; see `start`."""
        return self._start(source, out, *more, **limits).end()

    def _start(self, source: Path, out: Path, *more: str, **limits) -> "Run":
        arguments = [*map(str, self.command(source, out)), *more]
        return Run(self._main, arguments, **limits)

    def check_kills(self, times: int, seed: int = 0) -> None:
        """Kills it (SIGKILL) at random moments, and resumes it until it is done."""
        draw = random.Random(seed)
        assert self.whole
        while times > 0:
            if self._kill(draw.uniform(0, self.seconds)):
                times -= 1
            if self.out.exists():
                self._finish()
        self._finish()

    def _kill(self, seconds: float) -> bool:
        """Whether the command was killed before its end."""
        run = self._start(self.source, self.out, "--resume")
        run.process.join(seconds)
        run.process.kill()
        ended = run.end()
        assert ended.code in (0, -signal.SIGKILL), ended.error
        if self.out.exists():
            assert contents(self.out) == self.whole
        return ended.code != 0

    def _finish(self) -> None:
        """Resumes it to the end, compares, and clears away."""
        was_there = self.out.exists()
        done = self.run(self.source, self.out, "--resume")
        if not (was_there and "is there already" in done.error):
            assert done.code == 0, done.error
        assert contents(self.out) == self.whole
        assert not self.partial.exists()
        shutil.rmtree(self.out)

    def check_every_operation(self) -> None:
        """Kills it before each operation on a file, and resumes it."""
        assert self.whole
        for operation in range(1, 10_000):
            main = partial(killed_before, self.folder, operation, self._main)
            arguments = [*map(str, self.command(self.source, self.out)), "--resume"]
            ended = Run(main, arguments).end()
            assert ended.code in (0, -signal.SIGKILL), ended.error
            if self.out.exists():
                assert contents(self.out) == self.whole
            self._finish()
            if ended.code == 0:
                return

    def check_ctrl_c(self) -> None:
        """Stopped by the user after its first step."""
        assert self.whole
        for _ in range(10):  # it may be too quick for us
            run = self._start(self.source, self.out)
            while run.process.is_alive() and not list(self.partial.rglob("*.0.*")):
                time.sleep(0.001)
            os.kill(run.process.pid, signal.SIGINT)
            ended = run.end()
            assert ended.code in (0, 130), ended.error
            self._finish()
            if ended.code == 130:
                assert ended.error == "exl3: stopped; --resume goes on from here\n"
                return
        raise AssertionError("the command ended before it could be stopped, ten times")

    def check_file_size_limit(self, num_bytes: int) -> None:
        """No file may exceed this; a shard must. It is as if the disk were full."""
        assert self.whole
        done = self.run(self.source, self.out, file_bytes=num_bytes)
        line = refusal(done)
        assert "File too large" in line, line
        assert not self.out.exists()
        self._finish()

    def check_read_only(self) -> None:
        """Nothing can be made where the destination shall be."""
        place = self.folder / "read-only"
        place.mkdir()
        place.chmod(0o555)
        line = refusal(self.run(self.source, place / "out", as_owner=True))
        assert "Permission denied" in line, line
        assert str(place) in line, line
        assert list(place.iterdir()) == []

    def check_existing(self) -> None:
        """The destination is there, with or without `--resume`."""
        self.out.mkdir()
        for more in (), ("--resume",):
            line = refusal(self.run(self.source, self.out, *more))
            assert "is there already" in line, line
            assert str(self.out) in line, line
        assert list(self.out.iterdir()) == []
        self.out.rmdir()

    def check_source_as_destination(self) -> None:
        """SRC == DST, spelled in two ways, and DST within SRC."""
        source = self._copy("same")
        before = contents(source)
        link = self.folder / "same-link"
        link.symlink_to("same")
        for out in source, link, source / "inside", source / ".." / "same":
            line = refusal(self.run(source, out))
            assert "source" in line or "inside" in line, line
        assert contents(source) == before

    def check_link_loops(self) -> None:
        """SRC, a shard of it, or the folder of DST is a link that leads to itself."""
        loop = self.folder / "loop"
        loop.symlink_to("loop")
        assert "loop" in refusal(self.run(loop, self.out))
        line = refusal(self.run(self.source, loop / "out"))
        assert "loop" in line, line
        source = self._copy("looped")
        shard = first_shard(source)
        shard.unlink()
        shard.symlink_to(shard.name)
        line = refusal(self.run(source, self.out))
        assert shard.name in line, line
        assert not self.out.exists()
        assert not self.partial.exists()

    def check_empty_shard(self) -> None:
        """A shard has no byte."""
        source = self._copy("empty")
        shard = first_shard(source)
        shard.write_bytes(b"")
        line = refusal(self.run(source, self.out))
        assert shard.name in line, line
        assert not self.out.exists()
        assert not self.partial.exists()

    def check_missing(self) -> None:
        """There is no source, or it has no config.json."""
        assert "nowhere" in refusal(self.run(self.folder / "nowhere", self.out))
        source = self._copy("bare")
        (source / "config.json").unlink()
        assert "config.json" in refusal(self.run(source, self.out))
        assert not self.out.exists()
        assert not self.partial.exists()

    def check_refusals(self) -> None:
        """All that needs no run to the end."""
        self.check_missing()
        self.check_existing()
        self.check_source_as_destination()
        self.check_link_loops()
        self.check_empty_shard()
        self.check_read_only()

    def _copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.source, self.folder / name))


class Run:
    """A command in its own process.

    Args:
        main: Takes the arguments, returns the exit code.
        arguments: The command's.
        file_bytes: No file may become larger.
        as_owner: Root, too, is held to the permissions of files.
    """

    def __init__(
        self,
        main: Main,
        arguments: Sequence[str],
        file_bytes: int | None = None,
        as_owner: bool = False,
    ):
        self._error = tempfile.NamedTemporaryFile()  # noqa: SIM115
        given = main, arguments, self._error.name, file_bytes, as_owner
        self.process: BaseProcess = _PROCESSES.Process(target=_run, args=given)
        self.process.start()

    def end(self) -> Ended:
        """Waits for its end."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        with self._error:
            return Ended(code, Path(self._error.name).read_text())


def _run(
    main: Main,
    arguments: Sequence[str],
    error: str,
    file_bytes: int | None,
    as_owner: bool,
) -> None:
    """What the process does."""
    # A shell's background job, such as the tests may be, ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(error, os.O_WRONLY), 2)
    if file_bytes is not None:
        sys.dont_write_bytecode = True  # it would be cut as well
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    if as_owner:
        _drop_capability(_CAP_DAC_OVERRIDE)
    sys.exit(main(arguments))


def killed_before(
    folder: Path, operation: int, main: Main, arguments: Sequence[str]
) -> int:
    """Runs a command that is killed before an operation on a file.

    Args:
        folder: Where operations count: writing, renaming, linking, removing.
        operation: Which of them, from 1.
        main: What to run.
        arguments: Its arguments.
    """
    count = 0

    def watch(event: str, args: tuple) -> None:
        nonlocal count
        if event == "open":
            counts = bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        else:
            counts = event in _OPERATIONS
        if counts and str(folder) in str(args[0]):
            count += 1
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return main(arguments)


#: Names of Python's audit events.
_OPERATIONS = frozenset({"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir"})


def _nothing(arguments: Sequence[str]) -> int:
    return 0


def _drop_capability(capability: int) -> None:
    """Gives up one of root's privileges; others have none to give up."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the rest
    for call in libc.capget, libc.capset:
        if call(header, sets) != 0:
            raise OSError(ctypes.get_errno(), "capabilities")
        sets[0] &= ~(1 << capability)


def refusal(done: Ended) -> str:
    """The one line with which a command refused; it did, and said no more."""
    assert done.code == 1, done.error
    assert done.error.startswith("exl3: "), done.error
    assert done.error.count("\n") == 1, done.error
    return done.error


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder and below."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def first_shard(folder: Path) -> Path:
    """The first file of tensors."""
    return min(folder.glob("*.safetensors"))
