# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The release to move to: its wheels, by their hashes, and the torch that it needs."""

import re
import tempfile
import zipfile
from dataclasses import dataclass, replace
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

from tools.fork.errors import ForkError
from tools.fork.pins import Pins, WheelPin
from tools.fork.wheel import cache_folder, download, sha256_of


@dataclass(frozen=True)
class NewWheel:
    """One pinned wheel and what takes its place."""

    old: WheelPin
    new: WheelPin
    path: Path
    why: str = ""  # why it stands in, if it does

    @property
    def stands_in(self) -> bool:
        """Whether it is another project's wheel, as the pinned one has no such release.

        Its Python is that of the release, and its compiled code is for another target.
        """
        return self.old.name != self.new.name


@dataclass(frozen=True)
class Release:
    """Another upstream release, with a wheel for each that is pinned now."""

    version: str
    torch: str  # "torch==2.14.0"
    wheels: tuple[NewWheel, ...]

    def wheel(self, target: str, machine: str) -> NewWheel:
        """The wheel for a target and machine that UPSTREAM.toml pins."""
        for wheel in self.wheels:
            if (wheel.old.target, wheel.old.machine) == (target, machine):
                return wheel
        raise ForkError(f"UPSTREAM.toml pins no wheel for {target} on {machine}")


def release_version(said: str) -> str:
    """A release's number as a person said it, once it is sure to be one.

    Raises:
        ForkError: It is not.
    """
    if not re.fullmatch(r"\d+(\.\d+)+(\.?[a-z]+\d+)?", said):
        raise ForkError(f"{said!r} is not a release of upstream, such as 0.33.0")
    return said


def find_release(pins: Pins, version: str) -> Release:
    """Has pip fetch every wheel of a release, and takes their hashes.

    The fork builds on two projects: the official release, and a rebuild of it for
    CPUs, which comes later or not at all. Where that is missing, the official wheel
    of the same machine stands in, so that all but the compiled code can be tried.

    Args:
        pins: What is pinned now.
        version: The release, such as "0.33.0".

    Raises:
        ForkError: The official release cannot be had, or names no one torch.
    """
    found = {
        pin.machine: _fetch(pin, version) for pin in pins.wheels if pin.target == "cuda"
    }
    wheels = []
    for pin in pins.wheels:
        if pin.target == "cuda":
            wheels.append(NewWheel(pin, *found[pin.machine]))
            continue
        try:
            wheels.append(NewWheel(pin, *_fetch(pin, version)))
        except ForkError as error:
            official, path = found[pin.machine]
            stand_in = replace(official, target=pin.target)
            wheels.append(NewWheel(pin, stand_in, path, why=str(error)))
    return Release(version, _torch(wheels[0].path), tuple(wheels))


def _fetch(pin: WheelPin, version: str) -> tuple[WheelPin, Path]:
    """Fetches into the cache, where a build with the new pins finds it."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        otherwise = "name a release that it has"
        fetched = download(
            f"{pin.name}=={version}", pin.machine, Path(scratch), otherwise
        )
        sha256 = sha256_of(fetched)
        kept = cache / sha256[:16] / fetched.name
        kept.parent.mkdir(exist_ok=True)
        fetched.rename(kept)
    return replace(pin, sha256=sha256), kept


def _torch(wheel: Path) -> str:
    """The one torch that a wheel requires, less a build's local version."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(name).decode())
    required = [Requirement(line) for line in fields.get_all("Requires-Dist", [])]
    versions = {
        str(requirement.specifier).partition("+")[0]
        for requirement in required
        if requirement.name == "torch"
    }
    if len(versions) != 1 or not (version := versions.pop()).startswith("=="):
        raise ForkError(
            f"{wheel.name}: requires torch {' or '.join(sorted(versions)) or version}, "
            "where one release was expected; edit the pins by hand (docs/rebase.md)"
        )
    return f"torch{version}"
