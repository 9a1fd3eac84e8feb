# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Says what this machine lacks for a build, one line each, before anything is fetched.

Prints the interpreter to build with on stdout, and everything else on stderr:

    python3 tools/preflight.py

It reports Pythons that are too old, so it keeps to what Python 3.6 understands.
"""

import argparse
import ctypes
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
OLDEST, NEWEST = (3, 11), (3, 14)
MACHINES = ("x86_64", "aarch64")
LIBNUMA = "libnuma.so.1"

#: Free space for a first build, in GB: .venv 3.0 and build/ 0.5 where torch is a CPU
#: build, and pip's unpacking. torch's CUDA build needs several more.
FIRST_BUILD_GB = 5
REBUILD_GB = 1

# What there is to know of an interpreter, asked of the interpreter itself.
_PROBE = """
import importlib.util, json, os, sys, sysconfig
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
has = lambda name: importlib.util.find_spec(name) is not None
print(json.dumps({
    "path": sys.executable,
    "version": sys.version_info[:3],
    "venv": has("venv") and has("ensurepip"),
    "headers": os.path.isfile(header),
}))
"""


def probe(python: str) -> "dict | None":
    """Facts of an interpreter, or None if it does not run.

    A version manager may have a shim on PATH without a Python behind it.
    """
    try:
        said = subprocess.run(
            [python, "-c", _PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    return json.loads(said.stdout.decode()) if said.returncode == 0 else None


def is_supported(facts: dict) -> bool:
    """Whether the fork runs on an interpreter's version."""
    return OLDEST <= tuple(facts["version"][:2]) <= NEWEST


def dotted(facts: dict) -> str:
    """An interpreter's version, such as 3.11.7."""
    return ".".join(str(number) for number in facts["version"])


def choose_python(asked: str) -> dict:
    """Facts of the interpreter to build with.

    That is the one asked for if its version will do, else the first on PATH that will.
    """
    facts = probe(asked)
    if facts is None:
        raise SystemExit(f"missing: Python: {asked} does not run")
    if is_supported(facts):
        return facts
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        found = shutil.which(f"python3.{minor}")
        other = probe(found) if found else None
        if other:
            print(
                f"using {other['path']} ({dotted(other)}), since {facts['path']} is "
                f"{dotted(facts)}",
                file=sys.stderr,
            )
            return other
    return facts


def python_problem(facts: dict) -> "str | None":
    """What an interpreter lacks for making a virtual environment."""
    if not is_supported(facts):
        oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        return (
            f"Python: found {dotted(facts)} ({facts['path']}), need {oldest} to "
            f"{newest}; install one, or name one: PYTHON=/path/to/python3 make ..."
        )
    if not facts["venv"]:
        return (
            f"Python: {facts['path']} cannot make virtual environments; install its "
            "venv module (Debian, Ubuntu: apt install python3-venv)"
        )
    return None


def loads(library: str) -> bool:
    """Whether a shared library is where the system finds it."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def build_problems(facts: dict, venv: Path) -> "list[str]":
    """What the machine lacks for building the fork.

    Args:
        facts: Of the interpreter to build with.
        venv: The virtual environment to build into; one that is there is kept.
    """
    problems = []
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in MACHINES:
        problems.append(
            f"system: found {system} on {machine}, need Linux on "
            f"{' or '.join(MACHINES)}; upstream has no wheel for others"
        )
    # torch.compile calls the compiler too, and looks for the same two names.
    compiler = os.environ.get("CXX") or "g++"
    if not shutil.which(shlex.split(compiler)[0]):
        problems.append(
            f"C++ compiler: found no {compiler}; install g++ (Debian, Ubuntu: apt "
            "install g++), or name one: CXX=clang++ make ..."
        )
    target = os.environ.get("VLLM_TARGET_DEVICE")
    kernels = os.environ.get("EXL3_CUDA", "1" if target == "cuda" else "0") == "1"
    nvcc = os.environ.get("CUDACXX") or "nvcc"
    if kernels and not shutil.which(nvcc):
        problems.append(
            f"CUDA compiler: found no {nvcc}; put CUDA's bin folder on PATH, name it: "
            "CUDACXX=/path/to/nvcc make ..., or go without kernels: EXL3_CUDA=0"
        )
    if target == "cpu" and not loads(LIBNUMA):
        problems.append(
            f"libnuma: found no {LIBNUMA}, which upstream's compiled code for CPUs is "
            "linked with; install it (Debian, Ubuntu: apt install libnuma1)"
        )
    if is_supported(facts) and not facts["headers"]:
        problems.append(
            f"Python headers: {facts['path']} has no Python.h; install them (Debian, "
            "Ubuntu: apt install python3-dev)"
        )
    need = REBUILD_GB if (venv / ".built").exists() else FIRST_BUILD_GB
    free = shutil.disk_usage(str(REPO)).free / 1e9
    if free < need:
        problems.append(
            f"disk: {free:.1f} GB are free at {REPO}, the build needs {need} GB; free "
            "some, or move the repository"
        )
    kept = probe(str(venv / "bin" / "python"))
    if kept and is_supported(facts) and kept["version"][:2] != facts["version"][:2]:
        problems.append(
            f"environment: {venv} was made with Python {dotted(kept)}, not "
            f"{dotted(facts)}; run `make clean` first"
        )
    return problems


def main() -> int:
    """Reports every problem, or prints the interpreter to use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python-only", action="store_true", help="ask for no more than a Python"
    )
    parser.add_argument("--venv", type=Path, default=REPO / ".venv")
    args = parser.parse_args()

    facts = choose_python(sys.executable)
    problem = python_problem(facts)
    problems = [problem] if problem else []
    if not args.python_only:
        problems += build_problems(facts, args.venv)
    for problem in problems:
        print("missing: " + problem, file=sys.stderr)
    if problems:
        return 1
    print(facts["path"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
