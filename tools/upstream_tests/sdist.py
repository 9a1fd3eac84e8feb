# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Fetches upstream's source distribution and unpacks its tests.

The wheel holds no tests; the sdist does. Pip fetches it, so that the user's index,
proxy and certificate settings hold.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from tools.fork.errors import ForkError
from tools.fork.wheel import sha256_of

# pip asks a source distribution for its metadata before it will save the file, and
# upstream's own answer needs torch and a compiler. This stand-in for setuptools
# answers with the name and version alone; nothing of the sdist is executed.
_STAND_IN_BACKEND = """\
import os

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    name = "vllm-{version}.dist-info"
    os.mkdir(os.path.join(directory, name))
    with open(os.path.join(directory, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    return name
"""


def fetch_sdist(version: str, sha256: str, cache_dir: Path) -> Path:
    """Returns the pinned sdist of `vllm`, from the cache or through pip.

    Args:
        version: Upstream's version, such as ``0.32.0``.
        sha256: Hash of ``vllm-VERSION.tar.gz``, in hex.
        cache_dir: Folder outside the repository that keeps the file.

    Raises:
        ForkError: pip can't fetch the file, or its hash isn't the pinned one.
    """
    path = cache_dir / f"vllm-{version}.tar.gz"
    if not path.exists():
        _download(version, sha256, cache_dir)
    found = sha256_of(path)
    if found != sha256:
        raise ForkError(
            f"{path}: sha256 is {found}, pinned is {sha256}: delete the file and "
            "run again"
        )
    return path


def _download(version: str, sha256: str, cache_dir: Path) -> None:
    """Has pip save the sdist in `cache_dir`, checked against its hash."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        backend = Path(scratch, "setuptools")
        backend.mkdir()
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(
            _STAND_IN_BACKEND.format(version=version), encoding="utf-8"
        )
        requirement = Path(scratch, "requirement.txt")
        requirement.write_text(
            f"vllm=={version} --hash=sha256:{sha256}\n", encoding="utf-8"
        )
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "vllm", "--no-build-isolation"]
        command += ["--dest", str(cache_dir), "--requirement", str(requirement)]
        answer = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": scratch},
            capture_output=True,
            text=True,
        )
    if answer.returncode:
        errors = [
            line for line in answer.stderr.splitlines() if line.startswith("ERROR:")
        ]
        why = errors[-1].removeprefix("ERROR: ") if errors else answer.stderr.strip()
        raise ForkError(
            f"pip can't fetch the sdist of vllm {version}: {why} "
            f"(or put vllm-{version}.tar.gz into {cache_dir})"
        )


def unpack_tests(sdist: Path, target: Path) -> None:
    """Writes ``tests/`` and ``pyproject.toml`` of the sdist into an empty `target`.

    pyproject.toml holds upstream's pytest settings. The package itself stays packed:
    beside the tests it would shadow the installed one. Only plain files are written,
    only below `target`.

    Raises:
        ForkError: A member's path leaves its folder, or there are no tests.
    """
    if target.exists():
        shutil.rmtree(target)
    count = 0
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            inner = PurePosixPath(*path.parts[1:])
            wanted = inner.parts[:1] == ("tests",) or str(inner) == "pyproject.toml"
            if not member.isfile() or not wanted:
                continue
            if path.is_absolute() or ".." in path.parts:
                raise ForkError(f"{sdist}: member {member.name} leaves its folder")
            data = archive.extractfile(member)
            assert data is not None  # isfile() holds
            destination = target / inner
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_bytes(data.read())
            count += inner.parts[0] == "tests"
    if not count:
        raise ForkError(f"{sdist}: there is no tests/ in it")
