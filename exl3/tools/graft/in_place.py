# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Changes files of a folder so that it can be finished or undone after any stop.

New files are first written under names that nobody reads. The record in the folder
then says that they are taking their places, which is told to whoever reads meanwhile,
and at last that they have. A replaced file keeps its bytes under `NAME.orig`.
"""

import fcntl
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exl3.checkpoint.graft_record import GRAFT_FILE, ORIGINAL, GraftState
from exl3.checkpoint.json_files import read_json
from exl3.tools.shared import durable
from exl3.tools.shared.errors import ToolError

_NEW = ".graft"
_TEMPORARY = ".exl3-graft.unfinished"


@dataclass
class Record:
    """What is being changed, and how far it is."""

    state: str
    added: list[str]  # files that were not there
    replaced: list[str]
    about: dict[str, Any]  # what the change is, for people and for a second run


class InPlaceEdit:
    """One change of a folder's files.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.temporary = folder / _TEMPORARY
        self._file = folder / GRAFT_FILE

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second process away; the system lets go when this one ends.

        Raises:
            ToolError: Another one is at work.
        """
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ToolError(
                f"{self.folder}: another graft-mtp is changing it; wait for that one"
            ) from None
        try:
            yield
        finally:
            os.close(descriptor)

    def read(self) -> Record | None:
        """The record of a change, finished or not; None if there is none.

        Raises:
            ToolError: It is damaged.
        """
        if not os.path.lexists(self._file):
            return None
        content = read_json(self._file)
        try:
            record = Record(**content)
            names = [*record.added, *record.replaced]
            if GraftState(record.state) and all(map(_is_name, names)):
                return record
        except (TypeError, ValueError):
            pass
        raise ToolError(
            f"{self._file}: is no record of a graft, so nothing can be undone; fetch "
            "the checkpoint anew"
        )

    def begin(
        self,
        added: Collection[str],
        replaced: Collection[str],
        about: Mapping[str, Any],
    ) -> Record:
        """Announces a change.

        Raises:
            ToolError: A file is in the way.
        """
        beside = [f"{name}{end}" for name in replaced for end in (_NEW, ORIGINAL)]
        for name in [*added, *(f"{name}{_NEW}" for name in added), *beside]:
            if os.path.lexists(self.folder / name):
                raise ToolError(
                    f"{self.folder / name}: is there already, and the graft needs the "
                    "name; move it away"
                )
        record = Record(GraftState.PREPARING, [*added], [*replaced], dict(about))
        self._write(record)
        return record

    def new(self, name: str) -> Path:
        """Where a file is written that shall become `name`."""
        return self.folder / f"{name}{_NEW}"

    def commit(self, record: Record) -> None:
        """Puts the new files in their places; all of them are written."""
        for name in record.replaced:
            _keep(self.folder / name, self.folder / f"{name}{ORIGINAL}")
        durable.sync_folder(self.folder)
        record.state = GraftState.REPLACING
        self._write(record)
        self.finish(record)

    def finish(self, record: Record) -> None:
        """Goes on with a change that is `REPLACING`."""
        for name in (*record.added, *record.replaced):
            if os.path.lexists(self.new(name)):
                self.new(name).replace(self.folder / name)
        durable.sync_folder(self.folder)
        record.state = GraftState.DONE
        self._write(record)

    def undo(self, record: Record) -> None:
        """Brings back what was there before, whatever the state.

        Raises:
            ToolError: An original is gone.
        """
        originals = {
            name: self.folder / f"{name}{ORIGINAL}" for name in record.replaced
        }
        if record.state in (GraftState.REPLACING, GraftState.DONE):
            for name, original in originals.items():
                if not os.path.lexists(original):
                    raise ToolError(
                        f"{original}: is gone, so {name} cannot be brought back; fetch "
                        "the checkpoint anew"
                    )
        if record.state == GraftState.PREPARING:  # nothing was replaced yet
            for original in originals.values():
                original.unlink(missing_ok=True)
        else:
            record.state = GraftState.REVERTING
            self._write(record)
            for name, original in originals.items():
                if os.path.lexists(original):
                    original.replace(self.folder / name)
                    # Of two names of one file, both are left by a renaming.
                    original.unlink(missing_ok=True)
        for name in record.added:
            (self.folder / name).unlink(missing_ok=True)
        for name in (*record.added, *record.replaced):
            self.new(name).unlink(missing_ok=True)
        self.clear()
        durable.sync_folder(self.folder)
        self._file.unlink()
        durable.sync_folder(self.folder)

    def clear(self) -> None:
        """Removes what a process left that was killed while it wrote."""
        self.temporary.unlink(missing_ok=True)

    def _write(self, record: Record) -> None:
        durable.write_json(self._file, asdict(record), self.temporary)


def _is_name(name: object) -> bool:
    """Whether it names a file of the folder itself, and so may be replaced."""
    return isinstance(name, str) and name == Path(name).name and name not in ("", "..")


def _keep(file: Path, original: Path) -> None:
    """Gives a file a second name; a link stays the same link."""
    try:
        os.link(file, original, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(file, original, follow_symlinks=False)
