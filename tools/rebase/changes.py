# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What differs between two upstream wheels where the fork stands on them."""

import difflib
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tools.fork.drift_uses import Key


def source_diff(old: Path, new: Path, modules: Iterable[str]) -> str:
    """A unified diff of upstream's modules, to read beside the drift report."""
    parts: list[str] = []
    with zipfile.ZipFile(old) as before, zipfile.ZipFile(new) as after:
        for module in sorted(set(modules)):
            parts += difflib.unified_diff(
                _source(before, module).splitlines(),
                _source(after, module).splitlines(),
                f"old/{module}",
                f"new/{module}",
                lineterm="",
            )
    return "\n".join([*parts, ""])


def requirement_changes(old: list[str], new: list[str]) -> list[str]:
    """Lines of requirements that came (+) and went (-)."""
    went = [f"- {line}" for line in old if line not in new]
    came = [f"+ {line}" for line in new if line not in old]
    return sorted([*went, *came], key=lambda line: line[2:])


def files_that_use(repo: Path, keys: Iterable[Key]) -> dict[Key, list[str]]:
    """The fork's files that name an object, or extend its module."""
    texts = {
        path.relative_to(repo).as_posix(): path.read_text()
        for path in sorted((repo / "vllm").rglob("*.py"))
    }
    found = {}
    for module, name in keys:
        word = re.compile(rf"\b{re.escape(name.rpartition('.')[2])}\b")
        stem = module.replace(".", "/")
        extending = [p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in texts]
        naming = [path for path, text in texts.items() if word.search(text)]
        # `__init__` and the like are in every file; the module's own says enough.
        dunder = name.rpartition(".")[2].startswith("__")
        found[module, name] = extending or ([] if dunder else naming)
    return found


def _source(archive: zipfile.ZipFile, module: str) -> str:
    stem = module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if path in archive.namelist():
            return archive.read(path).decode()
    return ""
