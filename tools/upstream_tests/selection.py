# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads selection.toml: which of upstream's tests are run, and why those."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.fork.errors import ForkError

SELECTION_FILE = Path(__file__).with_name("selection.toml")


@dataclass(frozen=True)
class UpstreamFile:
    """A file of upstream's tests.

    Attributes:
        path: Such as ``tests/test_config.py``.
        why: What of the fork it covers.
        only: Names of the tests to run; empty for all.
        without: Node id endings to leave out; `why` says why.
    """

    path: str
    why: str
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """The file as pytest's arguments."""
        run = [f"{self.path}::{name}" for name in self.only] or [self.path]
        return run + [f"--deselect={self.path}::{name}" for name in self.without]


@dataclass(frozen=True)
class Group:
    """Files that one pytest process runs, in this order.

    Attributes:
        name: One word.
        covers: What they have in common.
        files: At least one.
    """

    name: str
    covers: str
    files: tuple[UpstreamFile, ...]

    def arguments(self) -> list[str]:
        """The group as pytest's arguments."""
        return [word for file in self.files for word in file.arguments()]


@dataclass(frozen=True)
class Selection:
    """The contents of selection.toml.

    Attributes:
        sdist_sha256: Hash of the sdist that holds the tests, in hex.
        limit_seconds: Limit of one test, in seconds.
        groups: In the order in which they run.
        left_out: Files that would fit but can't run here, with the reason.
    """

    sdist_sha256: str
    limit_seconds: float
    groups: tuple[Group, ...]
    left_out: dict[str, str]


def load_selection(path: Path = SELECTION_FILE) -> Selection:
    """Reads and checks a selection.

    Raises:
        ForkError: A field is missing or misspelt, or a file is listed twice.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        selection = Selection(
            sdist_sha256=data["sdist_sha256"],
            limit_seconds=float(data["limit_seconds"]),
            groups=tuple(_group(entry) for entry in data["groups"]),
            left_out=dict(data["left_out"]),
        )
    except KeyError as error:
        raise ForkError(f"{path.name}: field {error} is missing") from error
    except (OSError, TypeError, ValueError) as error:
        raise ForkError(f"{path.name}: {error}") from error
    listed = [file.path for group in selection.groups for file in group.files]
    listed += selection.left_out
    for name in listed:
        if listed.count(name) > 1:
            raise ForkError(f"{path.name}: {name} is listed twice; keep one entry")
    return selection


def choose(selection: Selection, names: list[str]) -> tuple[Group, ...]:
    """The groups of these names; all of them where no name is given.

    Raises:
        ForkError: There is no group of a name.
    """
    known = {group.name: group for group in selection.groups}
    for name in names:
        if name not in known:
            raise ForkError(f"no group {name!r}; choose of {', '.join(known)}")
    return tuple(known[name] for name in names) or selection.groups


def _group(entry: dict[str, Any]) -> Group:
    files = tuple(
        UpstreamFile(
            **file
            | {
                field: tuple(file[field])
                for field in ("only", "without")
                if field in file
            }
        )
        for file in entry["files"]
    )
    return Group(entry["name"], entry["covers"], files)
