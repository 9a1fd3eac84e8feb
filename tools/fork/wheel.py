# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Brings the pinned upstream wheel here and proves that it is that wheel."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.fork.errors import ForkError
from tools.fork.pins import WheelPin, select_machine

#: A local wheel to use instead of fetching one.
WHEEL_VARIABLE = "VLLM_UPSTREAM_WHEEL"


def cache_folder() -> Path:
    """Where fetched wheels are kept between builds."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vllm-hetero"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def obtain_wheel(pin: WheelPin, version: str) -> Path:
    """The pinned wheel as a local file, fetched by pip if it is not cached.

    pip does the fetching so that the user's index, proxy and certificate settings
    hold. A wheel named by `VLLM_UPSTREAM_WHEEL` is used where it lies.

    Raises:
        ForkError: The wheel cannot be had, or is not the pinned one.
    """
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise ForkError(f"{WHEEL_VARIABLE}={given}: no such file")
        _check(path, pin)
        return path

    folder = cache_folder() / pin.sha256[:16]
    cached = sorted(folder.glob("*.whl"))
    if not cached:
        return _fetch(pin, version, folder)
    if sha256_of(cached[0]) != pin.sha256:
        # An interrupted disk or a meddled cache; the fetched copy is checked anew.
        cached[0].unlink()
        return _fetch(pin, version, folder)
    return cached[0]


def download(requirement: str, machine: str, folder: Path, otherwise: str) -> Path:
    """Has pip fetch one wheel into a folder, without what it requires.

    Args:
        requirement: Such as "vllm==0.32.0".
        machine: The architecture that the wheel is for.
        folder: Where to put it; empty.
        otherwise: What a user can do who has no index, for the message.

    Raises:
        ForkError: pip cannot; the message repeats its reason.
    """
    print(f"fetching {requirement} for {machine}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--quiet", "--retries=2", "--only-binary=:all:", "--dest", str(folder)]
    if machine != select_machine() or sys.platform != "linux":
        # Only the drift check asks for another machine's wheel.
        command += ["--platform", f"manylinux_2_28_{machine}"]
    result = subprocess.run(
        [*command, requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        said = [line for line in result.stderr.splitlines() if line.strip()]
        # A crash of pip, as on a full disk, is headed "ERROR: Exception:" and ends in
        # the exception's own line.
        errors = [line for line in said if re.match(r"ERROR: (?!Exception:)", line)]
        reason = (errors or said or ["pip said nothing"])[-1]
        raise ForkError(
            f"cannot fetch {requirement} ({reason}); connect to a package index, "
            f"or {otherwise}"
        )
    return wheels[0]


def _fetch(pin: WheelPin, version: str, folder: Path) -> Path:
    """Downloads beside the cache and renames, so that the cache is never half full."""
    requirement = f"{pin.name}=={version}"
    otherwise = f"set {WHEEL_VARIABLE} to a local copy of the wheel"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            wheel = download(requirement, pin.machine, Path(scratch), otherwise)
            _check(wheel, pin)
            return wheel.rename(folder / wheel.name)
    except OSError as error:
        raise ForkError(
            f"cannot keep {pin.name} in {folder}: {error.strerror}; set XDG_CACHE_HOME "
            f"to a folder that can be written, or {WHEEL_VARIABLE} to a local wheel"
        ) from error


def _check(path: Path, pin: WheelPin) -> None:
    found = sha256_of(path)
    if found != pin.sha256:
        raise ForkError(
            f"{path.name}: sha256 is {found}, but UPSTREAM.toml pins {pin.sha256}; "
            "this is not the wheel that the fork was tested against"
        )
