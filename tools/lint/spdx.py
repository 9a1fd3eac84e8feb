# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Checks that source files start with the licence header.

python tools/lint/spdx.py FILE ...
"""

import sys
from pathlib import Path

HEADER = (
    "SPDX-License-Identifier: Apache-2.0",
    "SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project",
)
_COMMENT = {".cpp": "//", ".h": "//", ".cu": "//", ".cuh": "//"}


def header_problem(path: Path) -> str | None:
    """Which line of the header a file lacks, or None.

    A `#!` line may come first. An empty file has nothing to license.
    """
    lines = path.read_text().splitlines()
    if not lines:
        return None
    if lines[0].startswith("#!"):
        del lines[0]
    comment = _COMMENT.get(path.suffix, "#")
    for number, text in enumerate(HEADER):
        wanted = f"{comment} {text}"
        found = lines[number] if number < len(lines) else ""
        if found != wanted:
            return f"{path}: the header must say {wanted!r}, not {found!r}"
    return None


def main(names: list[str]) -> int:
    """Prints each file's problem; 1 if there was any."""
    problems = [p for p in map(header_problem, map(Path, names)) if p]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
