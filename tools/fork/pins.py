# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads UPSTREAM.toml: which upstream release, by which wheels, minus what."""

import os
import platform
import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.fork.errors import ForkError

REPO_ROOT = Path(__file__).resolve().parents[2]
PINS_FILE = REPO_ROOT / "UPSTREAM.toml"

#: What can be built. `empty` is the library `exl3` alone, without vLLM.
TARGETS = ("cpu", "cuda", "empty")


@dataclass(frozen=True)
class WheelPin:
    """One upstream wheel, identified by its content."""

    target: str
    machine: str
    name: str  # project name on the package index
    sha256: str


@dataclass(frozen=True)
class Pins:
    """The contents of UPSTREAM.toml, except the drift table."""

    version: str
    release: int
    wheels: tuple[WheelPin, ...]
    multimodal: tuple[str, ...]  # requirements that become an extra
    replace: dict[str, str]  # requirement name -> the requirement that stands for it

    def wheel(self, target: str, machine: str) -> WheelPin:
        """The wheel for a target on a machine.

        Raises:
            ForkError: No wheel is pinned for that pair.
        """
        for pin in self.wheels:
            if (pin.target, pin.machine) == (target, machine):
                return pin
        known = sorted(pin.machine for pin in self.wheels if pin.target == target)
        raise ForkError(
            f"no upstream wheel is pinned for target {target!r} on machine "
            f"{machine!r}; UPSTREAM.toml has {', '.join(known) or 'none'}"
        )

    def fork_version(self, target: str) -> str:
        """Version of what is built, such as `0.32.0+hetero.1.cpu`.

        Upstream selects its CPU platform when the installed version contains
        "cpu", so the suffix is not decoration.
        """
        suffix = "" if target == "cuda" else f".{target}"
        return f"{self.version}+hetero.{self.release}{suffix}"


def load_pins(path: Path = PINS_FILE) -> Pins:
    """Reads and checks a pins file.

    Raises:
        ForkError: The file is missing, is not TOML, or lacks or misspells a field.
    """
    try:
        data = tomllib.loads(path.read_text())
        pins = Pins(
            version=data["version"],
            release=data["release"],
            wheels=tuple(WheelPin(**wheel) for wheel in data["wheels"]),
            multimodal=tuple(data["requirements"]["multimodal"]),
            replace=dict(data["requirements"]["replace"]),
        )
    except KeyError as error:
        raise ForkError(f"{path.name}: field {error} is missing") from error
    except (OSError, TypeError, ValueError) as error:
        raise ForkError(f"{path.name}: {error}") from error
    for pin in pins.wheels:
        if not re.fullmatch(r"[0-9a-f]{64}", pin.sha256):
            raise ForkError(
                f"{path.name}: sha256 of {pin.name} for {pin.machine} is "
                f"{pin.sha256!r}, not 64 hexadecimal digits"
            )
    return pins


def select_target() -> str:
    """The target named by VLLM_TARGET_DEVICE, or the one this machine can run.

    Raises:
        ForkError: The variable names no target.
    """
    target = os.environ.get("VLLM_TARGET_DEVICE", "")
    if not target:
        return "cuda" if shutil.which("nvidia-smi") else "cpu"
    if target not in TARGETS:
        raise ForkError(
            f"VLLM_TARGET_DEVICE={target!r} is not a target; "
            f"choose one of {', '.join(TARGETS)}"
        )
    return target


def select_machine() -> str:
    """This machine's architecture, as wheels name it."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(
        platform.machine().lower(), platform.machine()
    )
