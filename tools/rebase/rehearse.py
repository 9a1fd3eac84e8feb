# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""One rehearsal, step by step: pins, drift, composition, imports, tests."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.fork.compose import compose
from tools.fork.drift import compare, read_table, write_table
from tools.fork.drift_source import Sources
from tools.fork.drift_uses import Key, Use, find_uses
from tools.fork.errors import ForkError
from tools.fork.metadata import read_metadata
from tools.fork.overlay import Overlay, module_name
from tools.fork.pins import Pins, load_pins, select_machine
from tools.fork.wheel import obtain_wheel
from tools.rebase.changes import files_that_use, requirement_changes, source_diff
from tools.rebase.environment import (
    Environment,
    failed_imports,
    own_environment,
    todays_environment,
)
from tools.rebase.pins import UPSTREAM, put_in_place, rewritten
from tools.rebase.release import Release, find_release
from tools.rebase.tests import Tests, run_tests
from tools.rebase.worktree import make_worktree, naming, uncommitted


@dataclass
class Rehearsal:
    """What a rehearsal found. What was not reached is None."""

    repo: Path
    folder: Path
    commit: str
    uncommitted: list[str]
    pins: Pins
    release: Release
    texts: dict[str, str]  # the new contents of the files that hold pins
    table: dict[Key, Use]
    drift: dict[Key, str]
    requirements: list[str]
    named: dict[str, int]
    users: dict[Key, list[str]]
    composed: dict[str, Overlay] = field(default_factory=dict)  # by target
    refused: dict[str, str] = field(default_factory=dict)  # by step
    environment: Environment | None = None
    modules: list[str] = field(default_factory=list)
    failed_imports: dict[str, str] | None = None
    tests: Tests | None = None

    @property
    def tree(self) -> Path:
        """The worktree."""
        return self.folder / "tree"

    @property
    def stands_in(self) -> bool:
        """Whether the wheel that this machine's tests run on is a stand-in."""
        return self.release.wheel("cpu", select_machine()).stands_in

    @property
    def succeeded(self) -> bool:
        """Whether everything that could be tried works. Drift is no failure."""
        return (
            not self.refused
            and self.failed_imports == {}
            and self.tests is not None
            and not self.tests.failed
        )


def rehearse(repo: Path, version: str, folder: Path, test_words: str) -> Rehearsal:
    """Moves a worktree to another release and tries everything in it.

    Args:
        repo: The repository; only read.
        version: The release.
        folder: Where the worktree and what was found go.
        test_words: More words for pytest.

    Raises:
        ForkError: The rehearsal cannot begin: no such release, or no git.
    """
    pins = load_pins(repo / UPSTREAM)
    release = find_release(pins, version)
    commit = make_worktree(repo, folder / "tree")
    texts = rewritten(folder / "tree", pins, release)
    put_in_place(folder / "tree", texts)
    found = _look(repo, folder, commit, pins, release, texts)
    _write_table(found)
    _compose(found)
    if "cpu" in found.composed:
        _run(found, test_words)
    return found


def _look(
    repo: Path,
    folder: Path,
    commit: str,
    pins: Pins,
    release: Release,
    texts: dict[str, str],
) -> Rehearsal:
    """Compares the two releases, without running either."""
    _say("comparing what the fork uses")
    machine = select_machine()
    old = obtain_wheel(pins.wheel("cuda", machine), pins.version)
    new = release.wheel("cuda", machine).path
    new_pins = load_pins(folder / "tree" / UPSTREAM)
    table = read_table(folder / "tree" / UPSTREAM)
    upstream = Sources(new)
    drift = compare(table, upstream)
    upstream.close()
    modules = {module for module, _ in drift}
    (folder / "changes.diff").write_text(source_diff(old, new, modules))
    return Rehearsal(
        repo,
        folder,
        commit,
        uncommitted(repo),
        pins,
        release,
        texts,
        table,
        drift,
        requirement_changes(
            read_metadata(old, pins).requirements,
            read_metadata(new, new_pins).requirements,
        ),
        naming(folder / "tree", pins.version),
        files_that_use(folder / "tree", drift),
    )


def _write_table(found: Rehearsal) -> None:
    """Makes the worktree's drift table anew, as its tests ask for a current one."""
    wheel = found.release.wheel("cpu", select_machine()).path
    try:
        write_table(found.tree / UPSTREAM, find_uses(Sources(wheel, found.tree)))
    except ForkError as error:
        found.refused["the drift table"] = str(error)


def _compose(found: Rehearsal) -> None:
    """Composes for each target; the CPU's tree is kept, to run."""
    pins = load_pins(found.tree / UPSTREAM)
    for target in sorted({pin.target for pin in pins.wheels}):
        _say(f"composing for {target}")
        out = found.folder / f"composed-{target}"
        try:
            found.composed[target] = compose(
                target, out, link=True, repo=found.tree, pins=pins
            )
        except ForkError as error:
            found.refused[f"composing for {target}"] = str(error)


def _run(found: Rehearsal, test_words: str) -> None:
    """Imports and tests the CPU's tree."""
    overlay = found.composed["cpu"]
    ours = [*overlay.added, *overlay.extended]
    modules = {module_name(path) for path in ours if _is_module(path)}
    found.modules = sorted(modules | {module for module, _ in found.table})
    try:
        found.environment = _environment(found)
    except ForkError as error:
        found.refused["the environment"] = str(error)
        return
    _say(f"importing {len(found.modules)} modules")
    found.failed_imports = failed_imports(
        found.environment, found.modules, found.folder
    )
    _say("testing")
    found.tests = run_tests(found.environment, found.tree, test_words, found.stands_in)


def _environment(found: Rehearsal) -> Environment:
    if not found.stands_in:
        return own_environment(found.tree)
    machine = select_machine()
    old = {
        target: obtain_wheel(found.pins.wheel(target, machine), found.pins.version)
        for target in ("cpu", "cuda")
    }
    pins = load_pins(found.tree / UPSTREAM)
    new = read_metadata(found.release.wheel("cpu", machine).path, pins).requirements
    names = {
        target: _names(read_metadata(wheel, pins).requirements)
        for target, wheel in old.items()
    }
    only_cuda = names["cuda"] - names["cpu"]
    return todays_environment(
        found.repo,
        found.tree,
        found.folder / "composed-cpu",
        pins.fork_version("cpu"),
        [line for line in new if not _names([line]) & only_cuda],
    )


def _names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def _is_module(path: str) -> bool:
    return path.startswith("vllm/") and path.endswith(".py")


def _say(words: str) -> None:
    print(f"rebase: {words}", file=sys.stderr, flush=True)
