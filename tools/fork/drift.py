# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Says what another upstream release changes under the fork.

    python -m tools.fork.drift --against 0.33.0     exit code 1 if anything changed
    python -m tools.fork.drift --write              after a change of the fork

UPSTREAM.toml holds a table of every upstream object that the fork uses, with a
fingerprint of it in the pinned release. docs/rebase.md says how to read the report.
"""

import argparse
import json
import sys
import tempfile
import tomllib
from contextlib import ExitStack
from pathlib import Path

from tools.fork.drift_fingerprint import Fingerprint, fingerprint
from tools.fork.drift_source import Ref, Sources
from tools.fork.drift_uses import Key, Use, find_uses
from tools.fork.errors import ForkError
from tools.fork.pins import PINS_FILE, REPO_ROOT, load_pins, select_machine
from tools.fork.wheel import download, obtain_wheel, sha256_of

#: Everything in UPSTREAM.toml from this line on is the tool's; all above is people's.
MARKER = "# Written by `python -m tools.fork.drift --write`; do not edit below.\n"
#: The official project. Its wheels hold the same Python for every target.
PROJECT = "vllm"


def read_table(pins_file: Path) -> dict[Key, Use]:
    """The drift table.

    Raises:
        ForkError: There is none, or it cannot be read.
    """
    try:
        tables = tomllib.loads(pins_file.read_text())["drift"]
        return {
            (module, name): Use(
                tuple(entry["use"]), Fingerprint(entry["signature"], entry["body"])
            )
            for module, entries in tables.items()
            for name, entry in entries.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForkError(
            f"{pins_file.name}: has no drift table that can be read ({error!r}); "
            "make it with python -m tools.fork.drift --write"
        ) from error


def write_table(pins_file: Path, uses: dict[Key, Use]) -> None:
    """Replaces the drift table, and leaves every other byte of the file alone."""
    by_people, marker, _ = pins_file.read_text().partition(MARKER)
    lines = [by_people, MARKER] if marker else [by_people, "\n", MARKER]
    last_module = ""
    for (module, name), use in sorted(uses.items()):
        if module != last_module:
            lines.append(f'\n[drift."{module}"]\n')
            last_module = module
        kinds = json.dumps(list(use.kinds))
        # A JSON string is a TOML string.
        signature = json.dumps(use.fingerprint.signature, ensure_ascii=False)
        lines.append(
            f'"{name}" = {{ use = {kinds}, body = "{use.fingerprint.body}", '
            f"signature = {signature} }}\n"
        )
    pins_file.write_text("".join(lines))


def compare(table: dict[Key, Use], upstream: Sources) -> dict[Key, str]:
    """What is different about each object of the table in another release.

    Args:
        table: The drift table.
        upstream: The other release, without the fork.

    Returns:
        Words for each object that changed; empty if none did.
    """
    changes: dict[Key, str] = {}
    for key, use in sorted(table.items()):
        if words := _changes_of(key, use, upstream):
            changes[key] = "; ".join(words)
    return {
        key: words
        for key, words in changes.items()
        if not _is_said_of_its_class(key, words, changes)
    }


def _changes_of(key: Key, use: Use, upstream: Sources) -> list[str]:
    module, name = key
    found = _find(key, upstream)
    if found is None:
        homes = _homes(name, upstream)
        if len(homes) != 1:
            return [f"moved to {' or '.join(homes)}" if homes else "gone"]
        found = Ref(homes[0], name)
    words = []
    new_module, new_name = upstream.upstream_key(found) or key
    if (new_module, new_name) != key:
        words.append(f"moved to {new_name if new_module == module else new_module}")
    now, before = fingerprint(upstream.definition(found)), use.fingerprint
    if now.signature != before.signature:
        words.append(f"signature changed: {before.signature} -> {now.signature}")
    if now.body != before.body:
        words.append("body changed")
    return words


def _is_said_of_its_class(key: Key, words: str, changes: dict[Key, str]) -> bool:
    """Whether a member is gone, or moved, only because its class is."""
    owner = (key[0], key[1].rpartition(".")[0])
    if words == "gone":
        return changes.get(owner) == words
    whole = changes.get(owner, "").partition("; ")[0]
    return words.startswith("moved") and words == whole


def _find(key: Key, upstream: Sources) -> Ref | None:
    """Looks an object up where the fork does, through re-exports and bases."""
    module, name = key
    head, *rest = name.split(".")
    found = upstream.lookup(module, head)
    for part in rest:
        found = upstream.member(found, part) if found else None
    return found


def _homes(name: str, upstream: Sources) -> list[str]:
    """Modules that define an object that left its own."""
    candidates = upstream.homes.get(name.partition(".")[0], [])
    return [module for module in candidates if upstream.definition(Ref(module, name))]


def report(changes: dict[Key, str], table: dict[Key, Use]) -> str:
    """What `--against` prints."""
    lines = []
    last_module = ""
    for (module, name), words in changes.items():
        if module != last_module:
            lines.append(module)
            last_module = module
        kinds = ", ".join(table[module, name].kinds)
        lines.append(f"  {name}: {words}  [{kinds}]")
    lines.append(f"{len(changes)} of {len(table)} objects that the fork uses changed")
    return "\n".join(lines)


def _obtain(version_or_wheel: str, scratch: Path) -> Path:
    """A wheel to compare against; its content is not pinned, so its hash is told."""
    wheel = Path(version_or_wheel)
    if not version_or_wheel.endswith(".whl"):
        pin = "" if version_or_wheel == "latest" else f"=={version_or_wheel}"
        otherwise = "give the path of a wheel"
        wheel = download(f"{PROJECT}{pin}", select_machine(), scratch, otherwise)
    elif not wheel.is_file():
        raise ForkError(f"--against {version_or_wheel}: no such file")
    print(f"{wheel.name}: sha256 {sha256_of(wheel)}", file=sys.stderr)
    return wheel


def main() -> int:
    """Compares or writes. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--against", metavar="VERSION_OR_WHEEL", help='"latest" is the newest release'
    )
    action.add_argument("--write", action="store_true", help="make the table anew")
    args = parser.parse_args()
    try:
        if args.write:
            pins = load_pins()
            wheel = obtain_wheel(pins.wheel("cpu", select_machine()), pins.version)
            uses = find_uses(Sources(wheel, REPO_ROOT))
            write_table(PINS_FILE, uses)
            print(f"UPSTREAM.toml: {len(uses)} objects of upstream are used")
            return 0
        table = read_table(PINS_FILE)
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            upstream = Sources(_obtain(args.against, scratch))
            stack.callback(upstream.close)
            changes = compare(table, upstream)
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(changes, table))
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
