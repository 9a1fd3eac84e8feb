# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The two rules by which the fork's files are laid over upstream's.

* **add**: upstream has nothing at the path, and the file goes there.
* **extend**: upstream has a module there. Upstream's stays beside ours as
  `<name>_upstream.py` (a package's `__init__.py` as `init_upstream.py`), and ours
  imports it. That import is how a file says that it means to extend.

There is no third rule, so no line of upstream's text is ever edited.
"""

import ast
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.fork.errors import ForkError

#: The top-level packages that hold the fork's files.
ROOTS = ("vllm", "exl3")
#: Endings of what is no source: caches, what was built, what editors leave.
_NOT_SHIPPED = ("__pycache__", ".pyc", ".so", "~", ".swp")


@dataclass(frozen=True)
class Overlay:
    """What the fork lays over upstream, by rule. Paths are relative and sorted."""

    added: tuple[str, ...]
    extended: tuple[str, ...]


def upstream_sibling(path: str) -> str:
    """Where upstream's module stands once the fork's has taken its path.

    >>> upstream_sibling("vllm/platforms/cpu.py")
    'vllm/platforms/cpu_upstream.py'
    >>> upstream_sibling("vllm/platforms/__init__.py")
    'vllm/platforms/init_upstream.py'
    """
    module = PurePosixPath(path)
    stem = "init" if module.stem == "__init__" else module.stem
    return str(module.with_name(f"{stem}_upstream.py"))


def module_name(path: str) -> str:
    """Dotted name of the module at a path.

    >>> module_name("vllm/platforms/__init__.py")
    'vllm.platforms'
    """
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def fork_files(repo: Path) -> list[str]:
    """Every file of the fork that belongs into the composed tree."""
    found = []
    for root in ROOTS:
        for path in (repo / root).rglob("*"):
            if path.is_file() and not any(
                part.endswith(_NOT_SHIPPED) for part in path.relative_to(repo).parts
            ):
                found.append(path.relative_to(repo).as_posix())
    return sorted(found)


def plan_overlay(repo: Path, upstream: set[str]) -> Overlay:
    """Decides the rule for each of the fork's files.

    Args:
        repo: The fork's repository.
        upstream: Every path in the upstream wheel.

    Raises:
        ForkError: A file collides in a way that neither rule covers, or extends a
            module that upstream no longer has.
    """
    added, extended = [], []
    for path in fork_files(repo):
        sibling = upstream_sibling(path)
        extends = path.endswith(".py") and _imports_sibling(repo / path, path, sibling)
        if path in upstream and extends:
            if sibling in upstream or (repo / sibling).exists():
                raise ForkError(f"{path}: {sibling} is taken, so it cannot extend")
            extended.append(path)
        elif path in upstream:
            advice = "rename it"
            if path.endswith(".py"):
                advice = f"import {module_name(sibling)} in it, or rename it"
            raise ForkError(
                f"{path}: upstream has a file there and ours does not extend it; "
                f"{advice}"
            )
        elif extends:
            raise ForkError(
                f"{path}: extends a module that upstream does not have; it was moved "
                "or removed there (python -m tools.fork.drift --against says where)"
            )
        else:
            _refuse_shadowing(path, upstream)
            added.append(path)
    return Overlay(tuple(added), tuple(extended))


def apply_overlay(repo: Path, composed: Path, overlay: Overlay, link: bool) -> None:
    """Lays the fork's files over an unpacked upstream tree.

    Args:
        repo: The fork's repository.
        composed: The unpacked upstream tree.
        overlay: What to lay, from `plan_overlay`.
        link: Make symbolic links, so that an edit in the repository is live.
    """
    for path in overlay.extended:
        (composed / path).rename(composed / upstream_sibling(path))
    for path in (*overlay.added, *overlay.extended):
        target = composed / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if link:
            target.symlink_to(repo / path)
        else:
            shutil.copyfile(repo / path, target)


def imported_module(package: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module that a `from` statement names.

    Args:
        package: The package in which the statement stands.
        node: The statement.
    """
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _imports_sibling(source: Path, path: str, sibling: str) -> bool:
    """Whether a module imports its upstream sibling, under any spelling."""
    wanted = module_name(sibling)
    package = wanted.rpartition(".")[0]
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ForkError(f"{path}: line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # not UTF-8, or a null byte
        raise ForkError(f"{path}: is no Python source ({error})") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = imported_module(package, node)
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if wanted in names:
            return True
    return False


def _refuse_shadowing(path: str, upstream: set[str]) -> None:
    """Of a module, a package and a compiled module of one name, Python sees one."""
    module = PurePosixPath(path)
    stems = [str(parent) for parent in module.parents[:-1]]
    inside: str | None = None
    if module.suffix == ".py" and module.stem != "__init__":
        stems.append(str(module.with_suffix("")))
        inside = f"{stems[-1]}/"
    for other in sorted(upstream):
        stem = other.partition(".")[0]
        is_module = other == f"{stem}.py" or other.endswith(".so")
        if (stem in stems and is_module) or (inside and other.startswith(inside)):
            raise ForkError(f"{path}: would shadow upstream's {other}; rename it")
