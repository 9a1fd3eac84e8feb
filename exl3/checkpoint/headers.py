# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Which tensors a checkpoint's folder holds, by its index and its files' headers."""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief  # a hostile value must not fill the log

from exl3.checkpoint.file_header import TensorHeader, check_names, read_header
from exl3.checkpoint.json_files import is_file, read_json
from exl3.checkpoint.problems import Problems
from exl3.format.errors import FileError

INDEX_FILE = "model.safetensors.index.json"
#: Bounds what a hostile folder can make us hold: four times GLM-5.2 in four slices.
MAX_TENSORS = 4_000_000
_SHOWN = 3  # names that a refusal lists
#: How many files a checkpoint has, by the name of one: `model-00001-of-00003`.
_SHARD = re.compile(r"(?P<name>.*-)[0-9]{1,6}-of-(?P<count>[0-9]{1,6})\.safetensors")


@dataclass(frozen=True)
class Listing:
    """The tensors of a checkpoint, and where its index and its files differ.

    The index, where there is one, decides which files belong to the checkpoint.
    """

    headers: tuple[TensorHeader, ...]  # every tensor of these files
    missing: tuple[tuple[str, str], ...] = ()  # name and file that the index gives
    unlisted: tuple[TensorHeader, ...] = ()  # the index does not list them here
    duplicates: tuple[tuple[TensorHeader, str], ...] = ()  # and the other file
    stray_files: tuple[str, ...] = ()  # safetensors files that the index leaves out
    incomplete: tuple[tuple[str, int], ...] = ()  # without an index: `few_shards`

    def check(self, problems: Problems | None = None) -> None:
        """Refuses a checkpoint whose index and files do not belong together.

        Args:
            problems: Takes note, if there is more than one.

        Raises:
            FileError: A tensor is missing or doubled, or a file is missing or left
                out.
        """
        problems = problems or Problems()
        for check in (
            self._check_missing,
            self._check_duplicates,
            self._check_stray,
            self._check_incomplete,
        ):
            with problems.noted():
                check()

    def _check_missing(self) -> None:
        if self.missing:
            file = self.missing[0][1]
            names = [name for name, where in self.missing if where == file]
            raise FileError(
                f"{file}: lacks {len(names)} tensors that {INDEX_FILE} places there: "
                f"{_some(names)}; fetch the file again, or rebuild the index"
            )

    def _check_duplicates(self) -> None:
        if self.duplicates:
            header, other = self.duplicates[0]
            raise FileError(
                f"{header.file}: {header.name} is stored in {other} too, as are "
                f"{len(self.duplicates) - 1} more; remove the wrong file"
            )

    def _check_stray(self) -> None:
        if self.stray_files:
            raise FileError(
                f"{INDEX_FILE}: does not list {_some(self.stray_files)}, which lies in "
                "the folder; rebuild the index, or remove the file"
            )

    def _check_incomplete(self) -> None:
        if self.incomplete:
            file, found = self.incomplete[0]
            raise FileError(
                f"{file}: its name says how many files there are, and the folder has "
                f"{found} of them and no {INDEX_FILE}; fetch the missing files"
            )

    def check_unlisted(self, is_superseded: Callable[[str], bool]) -> None:
        """Refuses tensors that the index does not list and that nothing replaces.

        Args:
            is_superseded: Whether the checkpoint has something else for a tensor.

        Raises:
            FileError: There is such a tensor.
        """
        rest = [at for at in self.unlisted if not is_superseded(at.name)]
        if rest:
            names = [header.name for header in rest if header.file == rest[0].file]
            raise FileError(
                f"{rest[0].file}: has {len(names)} tensors that {INDEX_FILE} does not "
                f"place there: {_some(names)}; rebuild the index, or remove them"
            )


def _some(names: Sequence[str]) -> str:
    """The first few of many names."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def few_shards(files: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Finds files whose names count more files than there are.

    Args:
        files: Names of safetensors files.

    Returns:
        The first file of each such checkpoint, and how many of it there are.
    """
    found: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for file in files:
        match = _SHARD.fullmatch(file)
        if match is not None:
            key = match["name"], match["count"]
            found[key] += 1
            first.setdefault(key, file)
    return tuple((first[key], n) for key, n in found.items() if n < int(key[1]))


def read_folder(folder: Path) -> tuple[TensorHeader, ...]:
    """Every tensor of a checkpoint; see `list_folder`."""
    return list_folder(folder).headers


def list_folder(folder: Path, problems: Problems | None = None) -> Listing:
    """Reads the index and every header of a checkpoint.

    Args:
        folder: The checkpoint's folder.
        problems: Takes note of damaged files, if there is more than one.

    Returns:
        Its tensors; none if the folder holds no safetensors files.

    Raises:
        FileError: A file is missing, damaged or outside the folder.
    """
    problems = problems or Problems()
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / INDEX_FILE
    listed = _weight_map(index) if os.path.lexists(index) else None
    if listed is None:
        files = present
    else:
        files = sorted(set(listed.values()))
        _check_files(folder, files)
    headers: list[TensorHeader] = []
    unlisted: list[TensorHeader] = []
    duplicates: list[tuple[TensorHeader, str]] = []
    seen: dict[str, str] = {}  # without an index: the file of each tensor
    for file in files:
        with problems.noted():
            of_file = read_header(folder / file)
            headers += of_file
            for header in of_file:
                if listed is None:
                    first = seen.setdefault(header.name, file)
                    if first != file:
                        duplicates.append((header, first))
                elif listed.get(header.name) == file:
                    del listed[header.name]
                else:
                    unlisted.append(header)
        if len(headers) > MAX_TENSORS:
            raise FileError(
                f"{folder}: holds more than {MAX_TENSORS} tensors, the most that are "
                "read"
            )
    problems.stop()  # the tensors of a damaged file would be missing, too
    return Listing(
        headers=tuple(headers),
        missing=tuple((listed or {}).items()),
        unlisted=tuple(unlisted),
        duplicates=tuple(duplicates),
        stray_files=tuple(sorted(set(present) - set(files))),
        incomplete=few_shards(files) if listed is None else (),
    )


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when a checkpoint's files do, told without reading any.

    Returns:
        The name, size in bytes and time of change in ns of every safetensors and JSON
        file.

    Raises:
        FileError: A safetensors file or the index is a link to nothing.
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            if file.suffix == ".json" and file.name != INDEX_FILE:
                continue  # whoever needs it will say so
            raise FileError(f"{file}: {error.strerror}") from error
        found.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise FileError(
            f"{INDEX_FILE}: has no weight_map from tensor to file; fetch it again, or "
            "rebuild the index"
        )
    check_names(weight_map, INDEX_FILE)
    for file in weight_map.values():
        if not isinstance(file, str):
            raise _outside(file)
    # A million names share a few files.
    return dict(zip(weight_map, map(sys.intern, weight_map.values()), strict=True))


def _check_files(folder: Path, files: list[str]) -> None:
    for file in files:
        if file != Path(file).name or not file.isprintable():
            raise _outside(file)
        if not is_file(folder / file):
            raise FileError(
                f"{INDEX_FILE}: weight_map names {file[:200]!r}, which is missing from "
                f"{folder}; fetch it, or rebuild the index"
            )
        if not file.endswith(".safetensors"):  # loaders look for no others
            raise FileError(
                f"{INDEX_FILE}: weight_map names {file[:200]!r}, whose name does not "
                "end in .safetensors; rename it, and rebuild the index"
            )


def _outside(file: object) -> FileError:
    return FileError(
        f"{INDEX_FILE}: weight_map names the file {brief(file)}, which is not in the "
        "checkpoint's folder"
    )
