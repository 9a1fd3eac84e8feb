# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Compiles the CUDA kernels for GPUs that need not be there, and reads the result.

A file is compiled again when its command, or any file that it included, has changed by
content. Everything is under `build/cubins`.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.kernels.emulated.build import CSRC, ROOT, WORDS

CACHE = ROOT / "build" / "cubins"
LAUNCH = CSRC / "exl3" / "launch"
ARCHITECTURES = ("90a", "120f")

_SITE = Path(sysconfig.get_paths()["platlib"])
_FLAGS = ("-std=c++17", "-O3", "-Xptxas=-v", f"-I{CSRC}")


class ToolMissingError(RuntimeError):
    """A compiler or disassembler is not installed; the message says how to get it."""


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel."""

    name: str
    numbers: tuple[int, ...]  # its template's integers, in order
    registers: int  # of a thread
    spilled: int  # bytes of a thread that registers did not hold, stack included


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture."""

    path: Path
    kernels: tuple[Kernel, ...]


def compile_all(architecture: str) -> list[Kernel]:
    """Every kernel of the library, as the build compiles it."""
    jobs: list[tuple[Path, tuple[str, ...]]] = []
    for source in sorted(LAUNCH.glob("*.cu")):
        of_words = "<EXL3_WORDS>" in source.read_text()
        each = [(f"-DEXL3_WORDS={words}",) for words in WORDS] if of_words else [()]
        jobs += [(source, defines) for defines in each]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cubins = pool.map(lambda job: compile_cubin(job[0], architecture, job[1]), jobs)
        return [kernel for cubin in cubins for kernel in cubin.kernels]


def compile_cubin(
    source: Path, architecture: str, defines: Sequence[str] = ()
) -> Cubin:
    """Compiles a file for one architecture, or finds what it compiled before.

    Args:
        source: A .cu file.
        architecture: As in `sm_90a`, without `sm_`.
        defines: More flags.

    Raises:
        ToolMissingError: There is no nvcc.
    """
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = [_nvcc(), *_FLAGS, target, *defines, "-cubin", str(source)]
    CACHE.mkdir(parents=True, exist_ok=True)
    # What the file included last time tells whether it must be compiled again.
    includes = CACHE / f"{_digest(shlex.join(command).encode())}.d"
    path = _output(command, includes)
    if path is None or not path.exists():
        fresh = includes.with_suffix(f".{os.getpid()}.cubin")
        listed = includes.with_suffix(f".{os.getpid()}.d")
        done = subprocess.run(
            [*command, "-MD", "-MF", str(listed), "-o", str(fresh)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
        listed.replace(includes)
        path = _output(command, includes)
        assert path is not None
        path.with_suffix(".txt").write_text(done.stderr)
        fresh.replace(path)
    return Cubin(path, tuple(_kernels(path.with_suffix(".txt").read_text())))


def instructions(cubin: Cubin) -> dict[tuple[int, ...], Counter[str]]:
    """Counts of the operations of each kernel, by its template's integers.

    Raises:
        ToolMissingError: There is no disassembler.
    """
    listing = subprocess.run(
        [_tool("nvdisasm"), "-c", str(cubin.path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    counts: dict[tuple[int, ...], Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in listing.splitlines():
        if section := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            current = counts.setdefault(_identify(section[1])[1], Counter())
        elif operation := re.match(r"\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)", line):
            current[operation[1]] += 1
    return counts


def _kernels(messages: str) -> list[Kernel]:
    """Reads `ptxas -v`."""
    parts = messages.split("Compiling entry function '")[1:]
    kernels = []
    for part in parts:
        name, numbers = _identify(part.partition("'")[0])
        found = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill",
            part,
        )
        registers = re.search(r"Used (\d+) registers", part)
        assert found and registers, part
        spilled = max(int(number) for number in found.groups())
        kernels.append(Kernel(name, numbers, int(registers[1]), spilled))
    return kernels


def _identify(mangled: str) -> tuple[str, tuple[int, ...]]:
    """A kernel's own name and its template's integers, from the mangled name."""
    name = re.search(r"[a-z][a-z_]*_(?:kernel|probe)", mangled)
    assert name, mangled
    numbers = re.findall(r"L(?:[ibj]|N\w+?E)(\d+)E", mangled)
    return name[0], tuple(int(number) for number in numbers)


def _nvcc() -> str:
    found = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if not found:
        raise ToolMissingError(
            "nvcc is not installed: put CUDA's bin folder on PATH, or set CUDACXX"
        )
    return found


def _tool(name: str) -> str:
    """A disassembler: CUDA's, or the one that triton brings."""
    triton = _SITE / "triton" / "backends" / "nvidia" / "bin" / name
    found = shutil.which(name) or (str(triton) if triton.exists() else None)
    if not found:
        raise ToolMissingError(
            f"{name} is not installed: put CUDA's bin folder on PATH, or install triton"
        )
    return found


def _output(command: Sequence[str], includes: Path) -> Path | None:
    """Where the result of these contents is; None if the contents aren't known."""
    if not includes.exists():
        return None
    text = includes.read_text().replace("\\\n", " ")
    paths = [Path(path) for path in text.partition(": ")[2].split()]
    if not all(path.exists() for path in paths):
        return None
    contents = b"".join(path.read_bytes() for path in paths)
    return CACHE / f"{_digest(shlex.join(command).encode() + contents)}.cubin"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
