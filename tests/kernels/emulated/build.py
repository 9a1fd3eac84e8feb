# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Compiles kernels for the host emulator, and keeps what it compiled.

An object is compiled again when its command or any file that it included has changed,
by content. Everything is under `build/emu`.
"""

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"
CACHE = ROOT / "build" / "emu"
BLOCK_ROWS = (16, 32, 48, 64, 128)
WORDS = (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)

_FLAGS = ("-std=c++17", "-fPIC", "-DEXL3_EMU")
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")


@dataclass(frozen=True)
class Source:
    """One file to compile, with what is defined for it alone."""

    path: Path
    defines: tuple[str, ...] = ()


def library(
    name: str,
    sources: Iterable[Source],
    defines: Sequence[str] = (),
    overlay: Path | None = None,
    optimize: str = "-O2",
    sanitize: bool = False,
) -> Path:
    """Builds a shared library of the sources and the emulator.

    Args:
        name: Of the library; one for each set of sources.
        sources: Files of kernels, launchers and the C functions that tests call.
        defines: For every file.
        overlay: A folder searched before `csrc`: a mutant's changed files.
        optimize: The compiler's level.
        sanitize: With AddressSanitizer and UndefinedBehaviorSanitizer.
    """
    flags = [*_FLAGS, optimize, *(f"-D{define}" for define in defines)]
    if sanitize:
        flags += ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    emulator = [Source(path) for path in sorted((CSRC / "emu").glob("*.cpp"))]
    everything = [*emulator, *sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(
            pool.map(lambda source: _compile(source, flags, overlay), everything)
        )
    inputs = " ".join(map(str, objects))
    target = CACHE / f"{name}-{_digest(inputs.encode())}.so"
    if not target.exists():
        sanitizers = ["-fsanitize=address,undefined"] if sanitize else []
        _run(["g++", "-shared", *sanitizers, *map(str, objects)], target)
    return target


def _compile(source: Source, flags: Sequence[str], overlay: Path | None) -> Path:
    own = [f"-D{define}" for define in source.defines]
    command = ["g++", "-x", "c++", *flags, *_WARNINGS, *own]
    # What the file included last time tells whether it must be compiled again, and
    # whether the overlay concerns it.
    includes = CACHE / f"{_digest(shlex.join([*command, str(source.path)]).encode())}.d"
    target = _object(command, includes, overlay)
    if target is None or not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary = includes.with_suffix(f".{os.getpid()}.d")
        fresh = includes.with_suffix(f".{os.getpid()}.o")
        search = [
            f"-I{folder}" for folder in (overlay, CSRC, ROOT) if folder is not None
        ]
        depend = ["-MMD", "-MF", str(temporary)]
        _run([*command, *search, *depend, "-c", str(source.path)], fresh)
        if overlay is None:
            temporary.replace(includes)
            target = _object(command, includes, overlay)
        if target is None:  # a mutant of a file that was never compiled as it is
            target = fresh.with_suffix(".mutant.o")
        fresh.replace(target)
    return target


def _object(
    command: Sequence[str], includes: Path, overlay: Path | None
) -> Path | None:
    """Where the object of these contents is; None if the contents aren't known."""
    if not includes.exists():
        return None
    text = includes.read_text().replace("\\\n", " ")
    paths = [Path(path) for path in text.partition(": ")[2].split()]
    if overlay is not None:
        shadows = {
            path: overlay / path.relative_to(CSRC)
            for path in paths
            if path.is_relative_to(CSRC)
        }
        paths = [
            shadows[path] if path in shadows and shadows[path].exists() else path
            for path in paths
        ]
    if not all(path.exists() for path in paths):
        return None
    contents = b"".join(path.read_bytes() for path in paths)
    return CACHE / f"{_digest(shlex.join(command).encode() + contents)}.o"


def _run(command: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    done = subprocess.run(
        [*command, "-o", str(fresh)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        raise RuntimeError(f"the compiler failed: {shlex.join(command)}")
    fresh.replace(target)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
