# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Rewrites the pins as text, so that comments and layout stay, and puts them in place.

Two files hold what a release decides: UPSTREAM.toml, and the build's torch in
pyproject.toml.
"""

from pathlib import Path

from tools.fork.drift import MARKER
from tools.fork.errors import ForkError
from tools.fork.pins import Pins, WheelPin
from tools.rebase.release import Release

UPSTREAM, PROJECT = "UPSTREAM.toml", "pyproject.toml"


def rewritten(repo: Path, pins: Pins, release: Release) -> dict[str, str]:
    """The texts of both files with a release's pins; the drift table stays.

    Args:
        repo: A checkout of the fork.
        pins: What it pins now.
        release: What to pin.

    Raises:
        ForkError: A line to rewrite isn't there, or is there twice.
    """
    upstream, marker, table = (repo / UPSTREAM).read_text().partition(MARKER)
    lines = [
        (f'\nversion = "{pins.version}"\n', f'\nversion = "{release.version}"\n'),
        (f"\nrelease = {pins.release}\n", "\nrelease = 1\n"),
        (f'"{pins.replace["torch"]}"', f'"{release.torch}"'),
    ]
    for wheel in release.wheels:
        lines.append((_lines(wheel.old), _lines(wheel.new)))
    for old, new in lines:
        upstream = _replace_once(upstream, old, new, UPSTREAM)
    project = _replace_once((repo / PROJECT).read_text(), *lines[2], where=PROJECT)
    return {UPSTREAM: upstream + marker + table, PROJECT: project}


def put_in_place(repo: Path, texts: dict[str, str]) -> None:
    """Replaces the files once all new ones are written, so that a full disk loses none.

    Raises:
        ForkError: They cannot be written; the old ones are still there.
    """
    new_files = {repo / name: repo / f"{name}.new" for name in texts}
    try:
        for (path, new_file), text in zip(new_files.items(), texts.values()):
            new_file.write_text(text)
            new_file.chmod(path.stat().st_mode)
        for path, new_file in new_files.items():
            new_file.replace(path)
    except OSError as error:
        raise ForkError(
            f"cannot write the pins in {repo}: {error.strerror}; git has the old ones"
        ) from error
    finally:
        for new_file in new_files.values():
            new_file.unlink(missing_ok=True)


def _lines(pin: WheelPin) -> str:
    """The lines of UPSTREAM.toml that say which wheel a pin is."""
    fields = ("target", "machine", "name", "sha256")
    return "".join(f'{field} = "{getattr(pin, field)}"\n' for field in fields)


def _replace_once(text: str, old: str, new: str, where: str) -> str:
    if text.count(old) != 1:
        raise ForkError(
            f"{where}: has {old.strip()!r} {text.count(old)} times, where once was "
            "expected; edit the pins by hand (docs/rebase.md)"
        )
    return text.replace(old, new)
