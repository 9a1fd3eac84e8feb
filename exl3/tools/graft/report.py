# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a graft does to a checkpoint: a line an edit, or all of them as JSON."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from exl3.checkpoint.file_header import TensorHeader


class Report:
    """Tells each edit when it is known, or as JSON everything at the end.

    Args:
        folder: The checkpoint that is changed.
        as_json: Whether to print JSON.
    """

    def __init__(self, folder: Path, as_json: bool):
        self._folder = str(folder)
        self._as_json = as_json
        self._edits: list[dict[str, Any]] = []

    def files(self, edit: str, names: Collection[str]) -> None:
        """Files that something is done with: `edit` is a verb."""
        if names:
            self._print(f"{edit} {', '.join(names)}")
        self._edits += [{"edit": edit, "file": name} for name in names]

    def tensors(
        self, edit: str, file: str, line: str, headers: Sequence[TensorHeader]
    ) -> None:
        """Tensors that come into a file or leave it: `line` says which of the two."""
        size = sum(header.num_bytes for header in headers)
        self._print(
            f"{line} {len(headers)} tensors, {size / 1e6:.1f} MB ({headers[0].name}, "
            "...)"
        )
        self._edits.append(
            {"edit": edit, "file": file, "tensors": len(headers), "bytes": size}
        )

    def change(self, file: str, change: str) -> None:
        """A field of a file of metadata."""
        self._print(f"{file}: {change}")
        self._edits.append({"edit": "changes", "file": file, "change": change})

    def end(self, outcome: str, line: str = "") -> None:
        """Tells what became of it.

        Args:
            outcome: One word.
            line: The same in words; none if nothing was done.
        """
        if self._as_json:
            of = {"folder": self._folder, "outcome": outcome, "edits": self._edits}
            print(json.dumps(of, indent=2))
        elif line:
            print(f"{self._folder}{line}")

    def _print(self, line: str) -> None:
        if not self._as_json:
            print(line)
