# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a rehearsal found, as a page: what changed, and what a person must look at."""

from collections.abc import Iterable

from tools.rebase.rehearse import Rehearsal
from tools.rebase.tests import Tests


def report(found: Rehearsal) -> str:
    """The page, in Markdown."""
    old, new = found.pins.version, found.release.version
    tests = found.tests or Tests()
    parts = [
        [f"# Rebase rehearsal: {old} to {new}", ""],
        _introduction(found),
        _steps(found),
        _section("Refused", _named_reasons(found.refused)),
        _section("Wheels", _wheels(found)),
        _section("Objects that changed", _drift(found)),
        _section("Modules that do not import", _named_reasons(found.failed_imports)),
        _section("Tests that failed", _named_reasons(tests.failed)),
        _section(
            "Tests that need upstream's compiled CPU code",
            _named_reasons(tests.compiled),
        ),
        _section(
            "Requirements that changed",
            ["```diff", *found.requirements, "```"] if found.requirements else [],
        ),
        _section(f"Files that name {old}", _files(found)),
    ]
    return "\n".join(line for part in parts for line in part)


def _introduction(found: Rehearsal) -> list[str]:
    tree = found.tree.relative_to(found.repo)
    lines = [f"Made of commit {found.commit}, in `{tree}`."]
    if found.uncommitted:
        lines.append(
            f"Not in it: uncommitted changes of {len(found.uncommitted)} files."
        )
    if found.stands_in:
        lines += [
            f"There is no CPU wheel of {found.release.version}: the official wheel",
            "stands in. Its Python was imported and tested, in the environment of this",
            "checkout. Upstream's compiled CPU code, and so the engine, was not tried.",
        ]
    if found.environment and (unmet := found.environment.unmet):
        lines.append(f"Required and not there: {', '.join(unmet)}.")
    return [*lines, ""]


def _steps(found: Rehearsal) -> list[str]:
    rows = [
        ("pins", f"{len(found.release.wheels)} wheels, {found.release.torch}"),
        ("drift", f"{len(found.drift)} of {len(found.table)} objects changed"),
    ]
    for target, overlay in found.composed.items():
        said = f"{len(overlay.added)} files added, {len(overlay.extended)} extended"
        rows.append((f"compose for {target}", said))
    if found.failed_imports is not None:
        good = len(found.modules) - len(found.failed_imports)
        rows.append(("imports", f"{good} of {len(found.modules)} modules"))
    if (tests := found.tests) is not None:
        said = f"{tests.passed} passed, {len(tests.failed)} failed"
        said += f", {tests.skipped} skipped"
        if tests.compiled:
            said += f", {len(tests.compiled)} need compiled CPU code"
        rows.append(("tests", said))
    rows += [(step, "refused, see below") for step in found.refused]
    return _table(("step", "outcome"), rows)


def _wheels(found: Rehearsal) -> list[str]:
    rows = []
    for wheel in found.release.wheels:
        name = f"stand-in: {wheel.new.name}" if wheel.stands_in else wheel.new.name
        rows.append((wheel.old.target, wheel.old.machine, name, wheel.new.sha256))
    lines = _table(("target", "machine", "project", "sha256"), rows)
    reasons = {wheel.why for wheel in found.release.wheels if wheel.why}
    return [*lines, *(f"\n{reason}" for reason in sorted(reasons))]


def _drift(found: Rehearsal) -> list[str]:
    """A list to tick off, by module."""
    lines = []
    last_module = ""
    for (module, name), words in found.drift.items():
        if module != last_module:
            lines += ["", f"{module}", ""]
            last_module = module
        kinds = ", ".join(found.table[module, name].kinds)
        ours = ", ".join(found.users[module, name])
        lines.append(f"- [ ] `{name}`: {words} ({kinds}{'; ' if ours else ''}{ours})")
    if lines:
        lines += ["", "Upstream's own changes of these modules are in `changes.diff`."]
    return lines[1:]


def _files(found: Rehearsal) -> list[str]:
    rows = [(path, str(count)) for path, count in sorted(found.named.items())]
    return _table(("file", "lines"), rows) if rows else []


def _named_reasons(reasons: dict[str, str] | None) -> list[str]:
    return [f"- `{name}`: {reason}" for name, reason in (reasons or {}).items()]


def _section(title: str, lines: list[str]) -> list[str]:
    """A section; none where there is nothing to say."""
    return ["", f"## {title}", "", *lines] if lines else []


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    every = [head, tuple("---" for _ in head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in every]
