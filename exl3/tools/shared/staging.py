# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Writes a checkpoint, whole or not at all, in steps that a later run goes on from."""

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from reprlib import repr as brief
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from exl3.checkpoint.file_header import TensorHeader, read_header
from exl3.checkpoint.headers import INDEX_FILE, fingerprint
from exl3.checkpoint.json_files import read_json
from exl3.tools.shared import durable
from exl3.tools.shared.errors import ToolError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
SHARD_FILE = "model-{number:05d}-of-{count:05d}.safetensors"
_JOURNAL = "journal.json"
_SOURCES = "source files"


class StagedCheckpoint:
    """Makes a checkpoint step by step beside its place; the end renames it there.

    All lies in `.NAME.partial` beside the folder. A step is done when the journal in
    there names it, which is after its tensors are on disk. So a run that was stopped
    at any moment is finished by another with the same request and `resume`.

        with StagedCheckpoint(folder, request, resume, sources=[source]) as out:
            for layer in layers:
                if not out.has(f"layer-{layer}"):
                    out.write_shard(f"layer-{layer}", tensors, note={"kept": kept})
            out.write_json("config.json", config)

    Args:
        folder: The folder to make.
        request: What decides the result, as JSON: the command and its arguments.
        resume: Whether to go on where a stopped run of the same request was.
        sources: Folders that are read; they must not change between runs.
        shard_bytes: A step's tensors go to more than one file when they take more.

    Raises:
        ToolError: The folder is there, or another run's partial state is.
    """

    def __init__(
        self,
        folder: Path,
        request: Mapping[str, Any],
        resume: bool = False,
        *,
        sources: Collection[Path] = (),
        shard_bytes: int = 4 << 30,
    ):
        self.folder = folder
        self.partial = folder.parent / f".{folder.name}.partial"
        self._content = self.partial / "checkpoint"
        self._temporary = self.partial / "unfinished"
        self._shard_bytes = shard_bytes
        self._resume = resume
        _check_place(folder, sources)
        files = {str(source): fingerprint(source) for source in sources}
        text = json.dumps({**request, _SOURCES: files}, default=str)
        self._request: dict[str, Any] = json.loads(text)
        self._steps: dict[str, dict[str, Any]] = {}
        self._state: str | None = None  # the file of `read_state`
        self._names: dict[str, str] = {}  # the step of each tensor
        self._is_published = False  # only the partial folder is left to be removed
        self._lock: BinaryIO | None = None

    def __enter__(self) -> Self:
        is_there = os.path.lexists(self.folder)
        if is_there and not (self._resume and self.partial.is_dir()):
            raise self._is_taken()
        try:
            self.partial.mkdir(parents=True, exist_ok=self._resume)
        except FileExistsError:
            raise ToolError(
                f"{self.partial}: is what a stopped run left; add --resume to finish "
                "it, or delete it"
            ) from None
        self._lock = _lock(self.partial / "lock", self.folder)
        try:
            self._read_journal()
            if is_there and not self._is_published:
                raise self._is_taken()
            if not self._is_published:
                self._content.mkdir(exist_ok=True)
            self._write_journal()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
                self._is_published = True
        finally:
            self._leave()

    def has(self, step: str) -> bool:
        """Whether a step is done."""
        return step in self._steps

    def note(self, step: str) -> Any:
        """What a step that is done left for later ones."""
        return self._steps[step]["note"]

    def headers(self) -> Iterator[TensorHeader]:
        """Every tensor that was added so far, by this run or a stopped one."""
        if not self._is_published:
            for staged, final in self._shards():
                yield from read_header(final if final.exists() else staged)

    def read_state(self) -> dict[str, "Tensor"] | None:
        """The state that the last step which had one left; None if none had."""
        if self._state is None:
            return None
        from safetensors.torch import load_file

        return load_file(self.partial / self._state)

    def record(
        self,
        step: str,
        note: Any = None,
        state: Mapping[str, "Tensor"] | None = None,
    ) -> None:
        """Marks a step as done that adds no tensors; see `write_shard`."""
        self.write_shard(step, {}, note, state)

    def write_shard(
        self,
        step: str,
        tensors: Mapping[str, "Tensor"],
        note: Any = None,
        state: Mapping[str, "Tensor"] | None = None,
    ) -> None:
        """Adds tensors, and marks a step as done.

        Args:
            step: The step's name, which is part of a file's name. The steps come in
                the same order in every run of a request.
            tensors: The checkpoint's tensors by name.
            note: Small JSON that later steps need, also in another run.
            state: Tensors that later steps need and the checkpoint does not have. It
                takes the place of the state that an earlier step left.

        Raises:
            ValueError: The step is done, or a tensor is there already.
            OSError: There is no space, or another reason why it cannot be written.
        """
        if step in self._steps:
            raise ValueError(f"{step}: is done already")
        for name in tensors:
            if name in self._names:
                raise ValueError(f"{name}: added by {self._names[name]} and by {step}")
        files = []
        for number, part in enumerate(_parts(tensors, self._shard_bytes)):
            files.append(f"{step}.{number}.safetensors")
            path = self._content / files[-1]
            durable.write_safetensors(path, part, self._temporary)
        before = self._state
        if state is not None:
            self._state = f"{step}.state.safetensors"
            path = self.partial / self._state
            durable.write_safetensors(path, state, self._temporary)
        self._steps[step] = {"files": files, "note": json.loads(json.dumps(note))}
        self._names |= dict.fromkeys(tensors, step)
        self._write_journal()
        if before is not None and before != self._state:
            (self.partial / before).unlink(missing_ok=True)

    def write_json(self, name: str, content: Any) -> None:
        """Writes a JSON file; every run does so anew."""
        if not self._is_published:
            durable.write_json(self._content / name, content, self._temporary)

    def copy(self, file: Path) -> None:
        """Copies a file under its own name; every run does so anew."""
        if self._is_published:
            return
        with (
            file.open("rb") as source,
            durable.durable_file(self._content / file.name, self._temporary) as target,
        ):
            shutil.copyfileobj(source, target)

    def _is_taken(self) -> ToolError:
        return ToolError(
            f"{self.folder}: is there already; name another folder, or delete it"
        )

    def _leave(self) -> None:
        """Removes the partial folder, unless a later run can go on from it."""
        if self._is_published or not self._steps:
            with suppress(OSError):
                (self.partial / _JOURNAL).unlink(missing_ok=True)
                shutil.rmtree(self.partial)
        if self._lock is not None:
            self._lock.close()

    def _read_journal(self) -> None:
        """Takes up what a stopped run left.

        Raises:
            ToolError: It is of another request, or a file of it is gone.
        """
        file = self.partial / _JOURNAL
        if not file.exists():  # stopped before it was written, or there was none
            return
        journal = read_json(file)
        self._steps, self._state = journal["steps"], journal["state"]
        for field in sorted(journal["request"].keys() | self._request.keys()):
            before, now = journal["request"].get(field), self._request.get(field)
            if before != now:
                values = f": {brief(before)} then, {brief(now)} now"
                raise ToolError(
                    f"{self.partial}: was left by a run with other {field}"
                    f"{'' if field == _SOURCES else values}; run --resume with what "
                    "that one had, or delete the folder"
                )
        self._is_published = (
            journal["finished"] and self.folder.is_dir() and not self._content.is_dir()
        )
        if self._is_published:
            return
        files = self._shards()
        for step, done in self._steps.items():
            for _ in done["files"]:
                staged, final = next(files)
                path = final if final.exists() else staged
                if not path.exists():
                    raise ToolError(
                        f"{path}: is gone, though {_JOURNAL} names it; delete "
                        f"{self.partial} and start anew"
                    )
                self._names |= {header.name: step for header in read_header(path)}

    def _write_journal(self, finished: bool = False) -> None:
        content = {
            "request": self._request,
            "steps": self._steps,
            "state": self._state,
            "finished": finished or self._is_published,
        }
        durable.write_json(self.partial / _JOURNAL, content, self._temporary)

    def _shards(self) -> Iterator[tuple[Path, Path]]:
        """Where each file of tensors is written, and its name in the end."""
        files = [file for step in self._steps.values() for file in step["files"]]
        for number, file in enumerate(files, start=1):
            name = SHARD_FILE.format(number=number, count=len(files))
            name = SINGLE_FILE if len(files) == 1 else name
            yield self._content / file, self._content / name

    def _publish(self) -> None:
        if self._is_published:
            return
        weight_map: dict[str, str] = {}
        total = 0
        for staged, final in self._shards():
            if not final.exists():
                staged.rename(final)
            for header in read_header(final):
                weight_map[header.name] = final.name
                total += header.num_bytes
        if len(set(weight_map.values())) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            self.write_json(INDEX_FILE, index)
        durable.sync_folder(self._content)
        self._write_journal(finished=True)
        self._content.rename(self.folder)
        durable.sync_folder(self.folder.parent)


def _lock(file: Path, folder: Path) -> BinaryIO:
    """Keeps a second run away; the system lets go when this process ends."""
    lock = file.open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ToolError(
            f"{folder}: another run is writing it; wait for that one, or name another "
            "folder"
        ) from None
    return lock


def _check_place(folder: Path, sources: Collection[Path]) -> None:
    """Refuses to write a checkpoint to where one is read."""
    place = Path(os.path.realpath(folder))  # unlike pathlib's, it bears a loop of links
    for source in sources:
        inside = Path(os.path.realpath(source))
        if place == inside or inside in place.parents:
            what = "the source itself" if place == inside else f"inside {source}"
            raise ToolError(f"{folder}: is {what}; name another folder")


def _parts(
    tensors: Mapping[str, "Tensor"], limit: int
) -> Iterator[Mapping[str, "Tensor"]]:
    """Splits tensors so that no part has more bytes than the limit, if it can."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part
