# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Metadata of the built distribution, derived from upstream's wheel."""

import configparser
import zipfile
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.fork.errors import ForkError
from tools.fork.pins import Pins

#: What the library alone needs. torch's stable ABI reaches back to this release.
LIBRARY_REQUIREMENTS = ["torch>=2.11"]
#: What serving over several machines needs. Upstream names no release of Ray; this is
#: the oldest that the tests have run on.
RAY_REQUIREMENTS = ["ray>=2.60"]
#: What the tools need to draw, and nothing else does.
PLOT_REQUIREMENTS = ["matplotlib>=3.8"]
#: The library's command. Upstream has none of this name.
LIBRARY_SCRIPTS = ["exl3 = exl3.cli:main"]


@dataclass(frozen=True)
class Metadata:
    """What `setup()` is given."""

    name: str
    requirements: list[str]
    extras: dict[str, list[str]]
    entry_points: dict[str, list[str]]


def library_metadata() -> Metadata:
    """Metadata of `exl3` without vLLM."""
    scripts = {"console_scripts": list(LIBRARY_SCRIPTS)}
    extras = {"plot": list(PLOT_REQUIREMENTS)}
    return Metadata("exl3", LIBRARY_REQUIREMENTS, extras, scripts)


def read_metadata(wheel: Path, pins: Pins) -> Metadata:
    """Upstream's requirements and entry points, changed as UPSTREAM.toml says.

    Raises:
        ForkError: The wheel has no metadata.
    """
    from email.parser import Parser

    with zipfile.ZipFile(wheel) as archive:
        fields = Parser().parsestr(_read(archive, "METADATA"))
        scripts = configparser.ConfigParser(delimiters=("=",))
        scripts.read_string(_read(archive, "entry_points.txt"))

    requirements: list[str] = []
    extras: dict[str, list[str]] = {
        extra: [] for extra in fields.get_all("Provides-Extra", [])
    }
    extras["multimodal"] = []
    extras["plot"] = list(PLOT_REQUIREMENTS)
    extras["ray"] = list(RAY_REQUIREMENTS)
    for line in fields.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        extra = _extra_of(requirement, extras)
        if extra:
            requirement.marker = None
            extras[extra].append(str(requirement))
        elif name in pins.multimodal:
            extras["multimodal"].append(str(requirement))
        else:
            replaced = pins.replace.get(name, str(requirement))
            if replaced not in requirements:
                requirements.append(replaced)
    entry_points = {
        group: [f"{name} = {value}" for name, value in scripts.items(group)]
        for group in scripts.sections()
    }
    entry_points.setdefault("console_scripts", []).extend(LIBRARY_SCRIPTS)
    return Metadata("vllm", requirements, extras, entry_points)


def unpack_licences(wheel: Path, folder: Path) -> list[Path]:
    """Copies the licence files of upstream's wheel to `folder`."""
    unpacked = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".dist-info/licenses/" in name and not name.endswith("/"):
                target = folder / Path(name).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
                unpacked.append(target)
    return unpacked


def _read(archive: zipfile.ZipFile, name: str) -> str:
    for path in archive.namelist():
        if path.endswith(f".dist-info/{name}"):
            return archive.read(path).decode()
    raise ForkError(f"{archive.filename}: has no {name}; it is not a vLLM wheel")


def _extra_of(requirement: Requirement, extras: dict[str, list[str]]) -> str | None:
    """The extra that a requirement belongs to. Upstream's markers name one at most."""
    marker = str(requirement.marker or "")
    for extra in extras:
        if f'extra == "{extra}"' in marker:
            return extra
    return None
