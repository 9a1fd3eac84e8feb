# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Parses JSON that nobody vouches for."""

import json
from pathlib import Path
from typing import Any

from exl3.format.errors import FileError

#: GLM-5.2's index in four slices has 921,600 names and 120 MB.
MAX_JSON_BYTES = 500_000_000


def parse_json(text: bytes, what: str) -> Any:
    """Parses JSON in which no object has a key twice.

    Args:
        text: UTF-8.
        what: What it is, for the refusal.

    Raises:
        FileError: It is no such JSON.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise FileError(
            f"{what} is not JSON ({reason}); the file is damaged, fetch it again"
        ) from None


def read_json(file: Path) -> Any:
    """Reads a JSON file.

    Raises:
        FileError: It cannot be read, is too large, or is no JSON.
    """
    try:
        size = file.stat().st_size
        if not file.is_file():
            raise FileError(f"{file}: is no file; remove it, or put the file there")
        if size > MAX_JSON_BYTES:
            raise FileError(
                f"{file}: has {size} bytes; expected a JSON file of at most "
                f"{MAX_JSON_BYTES}"
            )
        text = file.read_bytes()
    except OSError as error:
        raise FileError(f"{file}: {error.strerror}") from error
    return parse_json(text, file.name)


def is_file(file: Path) -> bool:
    """Whether there is such a file; a name that cannot be one, being too long, is none.

    pathlib raises for such a name.
    """
    try:
        return file.is_file()
    except OSError:
        return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for twice, _ in pairs:
            if twice in seen:
                break
            seen.add(twice)
        raise ValueError(f"the key {twice[:200]!r} is there twice")
    return found
