# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What `pip wheel .` and `pip install .` make of the repository, and what they say."""

import base64
import csv
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tools.fork.overlay import fork_files, plan_overlay, upstream_sibling
from tools.fork.pins import REPO_ROOT, load_pins, select_machine
from tools.fork.wheel import obtain_wheel

PIP = [sys.executable, "-m", "pip"]
#: Not part of a checkout, or of no use to a build.
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "examples", "*.egg-info", "__pycache__"
)


def pip_wheel(repo, folder, **variables):
    """Builds in this environment: the build's requirements are in it."""
    command = [*PIP, "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    return subprocess.run(
        [*command, str(repo)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"VLLM_TARGET_DEVICE": "tpu"},
            "error: VLLM_TARGET_DEVICE='tpu' is not a target; choose one of cpu,",
        ),
        (
            {"VLLM_TARGET_DEVICE": "cpu", "VLLM_UPSTREAM_WHEEL": "/nowhere/vllm.whl"},
            "error: VLLM_UPSTREAM_WHEEL=/nowhere/vllm.whl: no such file",
        ),
        (
            {"VLLM_TARGET_DEVICE": "cpu", "VLLM_UPSTREAM_WHEEL": __file__},
            "this is not the wheel that the fork was tested against",
        ),
        (
            {
                "VLLM_TARGET_DEVICE": "cpu",
                "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
                "PIP_EXTRA_INDEX_URL": "",
                "PIP_FIND_LINKS": "",
                "PIP_CONFIG_FILE": os.devnull,
            },
            "connect to a package index, or set VLLM_UPSTREAM_WHEEL to a local copy",
        ),
    ],
    ids=["unknown target", "missing wheel", "wrong hash", "offline"],
)
def test_pip_shows_the_reason_without_being_asked(tmp_path, variables, message):
    result = pip_wheel(REPO_ROOT, tmp_path, **variables)
    assert result.returncode
    said = [line.strip() for line in result.stderr.splitlines()]
    reasons = [line for line in said if line.startswith("error: ") and message in line]
    assert len(reasons) == 1, result.stderr
    assert "Traceback" not in result.stderr + result.stdout


def test_the_environment_is_consistent():
    result = subprocess.run(
        [*PIP, "check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_the_installed_fork_says_one_version(tmp_path):
    """From outside the repository, where only what is installed can be imported."""
    code = (
        "import importlib.metadata, vllm.version; "
        "print(importlib.metadata.version('vllm'), vllm.version.__version__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    pins = load_pins()
    metadata, module = result.stdout.split()
    assert metadata == module
    assert metadata in {pins.fork_version(target) for target in ("cpu", "cuda")}


@pytest.fixture(scope="module", params=["empty", "cpu", "cuda"])
def built(request, tmp_path_factory):
    """A target and its wheel, built from a copy of the repository."""
    folder = tmp_path_factory.mktemp(request.param)
    repo = folder / "repo"
    shutil.copytree(REPO_ROOT, repo, ignore=LEFT_OUT)
    result = pip_wheel(repo, folder, VLLM_TARGET_DEVICE=request.param)
    assert result.returncode == 0, result.stderr
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(repo)
    yield request.param, wheel
    shutil.rmtree(folder)


@pytest.fixture
def archive(built):
    with zipfile.ZipFile(built[1]) as opened:
        yield opened


def read_info(archive, name):
    (path,) = [n for n in archive.namelist() if n.endswith(f".dist-info/{name}")]
    return archive.read(path).decode()


@pytest.mark.slow
def test_the_name_and_tag_are_right(built, archive):
    target, wheel = built
    name = "exl3" if target == "empty" else "vllm"
    version = load_pins().fork_version(target)
    tag = f"cp311-abi3-linux_{platform.machine()}"
    assert wheel.name == f"{name}-{version}-{tag}.whl"
    assert f"Tag: {tag}" in read_info(archive, "WHEEL").splitlines()
    assert "Root-Is-Purelib: false" in read_info(archive, "WHEEL").splitlines()


@pytest.mark.slow
def test_every_file_is_on_record(archive):
    rows = {
        row[0]: row[1:] for row in csv.reader(io.StringIO(read_info(archive, "RECORD")))
    }
    assert rows.keys() == set(archive.namelist())
    for path, (digest, size) in rows.items():
        if path.endswith(".dist-info/RECORD"):
            continue
        data = archive.read(path)
        code = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
        assert (digest, int(size)) == (f"sha256={code.decode()}", len(data)), path


@pytest.mark.slow
def test_the_files_are_upstreams_and_ours_and_nothing_else(built, archive):
    target, _ = built
    held = {
        info.filename: info
        for info in archive.infolist()
        if ".dist-info/" not in info.filename
    }
    compiled = held.pop("exl3/_C.abi3.so")
    assert compiled.file_size
    if target == "empty":
        ours = [path for path in fork_files(REPO_ROOT) if path.startswith("exl3/")]
        assert held.keys() == set(ours)
        return

    pins = load_pins()
    upstream = obtain_wheel(pins.wheel(target, select_machine()), pins.version)
    with zipfile.ZipFile(upstream) as original:
        overlay = plan_overlay(REPO_ROOT, set(original.namelist()))
        for info in original.infolist():
            path = info.filename
            if ".dist-info/" in path or path == "vllm/_version.py":
                continue
            path = upstream_sibling(path) if path in overlay.extended else path
            ours = held.pop(path)
            assert (ours.CRC, ours.file_size) == (info.CRC, info.file_size), path
            may_run = [i.external_attr >> 16 & 0o111 for i in (ours, info)]
            assert bool(may_run[0]) == bool(may_run[1]), path
    assert held.pop("vllm/_version.py")
    assert held.keys() == {*overlay.added, *overlay.extended}
    for path in held:
        assert archive.read(path) == (REPO_ROOT / path).read_bytes(), path


@pytest.mark.slow
def test_the_metadata_is_complete(built, archive):
    target, _ = built
    fields = Parser().parsestr(read_info(archive, "METADATA"))
    required = fields.get_all("Requires-Dist")
    core = [line for line in required if "extra ==" not in line]
    names = {line.split(";")[0].strip() for line in core}
    assert fields["Version"] == load_pins().fork_version(target)
    assert fields["License-Expression"] == "Apache-2.0"
    assert SpecifierSet(fields["Requires-Python"]) == SpecifierSet(">=3.11,<3.15")
    commands = read_info(archive, "entry_points.txt")
    assert "exl3 = exl3.cli:main" in commands
    if target == "empty":
        assert names == {"torch>=2.11"}
        return
    assert "torch==2.13.0" in names
    assert not any("+cpu" in line for line in required)
    for name in load_pins().multimodal:
        assert not [line for line in core if line.startswith(name)]
        extra = [line for line in required if line.startswith(name)]
        assert extra, name
        assert 'extra == "multimodal"' in extra[0]
    assert "vllm = vllm.entrypoints.cli.main:main" in commands


@pytest.mark.slow
def test_the_licences_are_inside(built, archive):
    target, _ = built
    held = [name for name in archive.namelist() if ".dist-info/licenses/" in name]
    texts = [archive.read(name).decode() for name in held]
    assert (REPO_ROOT / "LICENSE").read_text() in texts
    assert len(held) == (1 if target == "empty" else 2)
    assert all("Apache License" in text for text in texts)


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """The packages that it requires are borrowed from this environment."""
    target, wheel = built
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True
    )
    python = tmp_path / "bin" / "python"
    where = [
        str(python),
        "-c",
        "import sysconfig; print(sysconfig.get_path('platlib'))",
    ]
    site = Path(subprocess.check_output(where, text=True).strip())
    (site / "borrowed.pth").write_text(sysconfig.get_path("platlib") + "\n")
    install = [*PIP, "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, "-q", str(wheel)], check=True)

    code = "import exl3.ops; print(exl3.ops.__file__); print(exl3.ops.ops_version())"
    if target != "empty":
        code += "; import vllm.version as v; print(v.__file__); print(v.__version__)"
    result = subprocess.run(
        [str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    expected = [str(site / "exl3" / "ops.py"), "1"]
    if target != "empty":
        version = load_pins().fork_version(target)
        expected += [str(site / "vllm" / "version.py"), version]
    assert result.stdout.splitlines() == expected
    shutil.rmtree(site)
