# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The composed tree: what is in it, and what an interruption leaves."""

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tools.fork import compose as compose_module
from tools.fork.compose import compose, describe
from tools.fork.errors import ForkError
from tools.fork.pins import REPO_ROOT

UPSTREAM = {
    "vllm/m/__init__.py": "WHO = 'upstream package'\n",
    "vllm/m/cpu.py": "WHO = 'upstream'\n",
    "vllm/m/other.py": "OTHER = 1\n",
    "vllm/_version.py": "__version__ = '0.32.0'\n",
}
FORK = {
    "vllm/fork.py": (REPO_ROOT / "vllm" / "fork.py").read_text(),
    "vllm/m/cpu.py": "from . import cpu_upstream as upstream\nWHO = 'fork'\n",
    "vllm/m/__init__.py": "from . import init_upstream as upstream\nWHO = 'fork'\n",
    "exl3/__init__.py": "",
}


@pytest.fixture
def repo(make_repo):
    return make_repo(FORK)


@pytest.fixture
def pins(make_wheel, pin_wheel):
    return pin_wheel(make_wheel(UPSTREAM))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "build" / "composed"


@pytest.fixture
def make(repo, pins, out):
    """Composes into `out`."""

    def make_tree(link=False, target="cpu", pins=pins):
        overlay = compose(target, out, link=link, repo=repo, pins=pins)
        return out, overlay

    return make_tree


def files_in(tree: Path) -> dict[str, str]:
    return {
        str(path.relative_to(tree)): path.read_text()
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("link", [False, True])
def test_the_tree_is_upstream_with_our_files_over_it(make, link):
    out, overlay = make(link=link)
    files = files_in(out)
    files.pop(".composed", None)
    version = files.pop("vllm/_version.py")
    assert files == {
        **FORK,
        "vllm/__init__.py": "",
        "vllm/m/cpu_upstream.py": UPSTREAM["vllm/m/cpu.py"],
        "vllm/m/init_upstream.py": UPSTREAM["vllm/m/__init__.py"],
        "vllm/m/other.py": UPSTREAM["vllm/m/other.py"],
    }
    assert describe(overlay).splitlines() == [
        "added 2 files, extended 2:",
        "  add    exl3/__init__.py",
        "  add    vllm/fork.py",
        "  extend vllm/m/__init__.py",
        "  extend vllm/m/cpu.py",
    ]
    names: dict = {}
    exec(version, names)
    assert names["__version__"] == names["version"] == "0.32.0+hetero.3.cpu"
    assert names["__version_tuple__"] == (0, 32, 0, "hetero.3.cpu")


def test_the_library_alone_has_nothing_of_vllm(make, monkeypatch):
    monkeypatch.delenv("VLLM_UPSTREAM_WHEEL")
    out, _ = make(target="empty")
    assert files_in(out) == {"exl3/__init__.py": ""}


def test_links_are_live(make, repo):
    out, _ = make(link=True)
    (repo / "vllm/m/cpu.py").write_text("WHO = 'edited'\n")
    assert (out / "vllm/m/cpu.py").read_text() == "WHO = 'edited'\n"


def test_a_built_tree_has_no_links(make):
    out, _ = make()
    assert not [path for path in out.rglob("*") if path.is_symlink()]


def test_a_current_tree_is_kept(make):
    out, _ = make(link=True)
    before = out.stat().st_ino
    assert make(link=True)[0].stat().st_ino == before


def test_a_tree_is_made_anew_when_anything_changed(make, repo, pins):
    out, _ = make(link=True)
    (repo / "vllm/new.py").write_text("")
    make(link=True)
    assert (out / "vllm/new.py").is_symlink()

    (repo / "vllm/m/cpu.py").unlink()
    make(link=True)
    assert (out / "vllm/m/cpu.py").read_text() == UPSTREAM["vllm/m/cpu.py"]
    assert not (out / "vllm/m/cpu_upstream.py").exists()

    make(link=True, pins=replace(pins, release=4))
    assert "hetero.4" in (out / "vllm/_version.py").read_text()


def test_executables_stay_executable(make_wheel, pin_wheel, make_repo, tmp_path):
    wheel = make_wheel(UPSTREAM)
    with zipfile.ZipFile(wheel, "a") as archive:
        tool = zipfile.ZipInfo("vllm/tool")
        tool.external_attr = 0o100755 << 16
        archive.writestr(tool, "#!/bin/sh\n")
    out = tmp_path / "out"
    compose("cpu", out, link=False, repo=make_repo(FORK), pins=pin_wheel(wheel))
    assert os.access(out / "vllm/tool", os.X_OK)
    assert not os.access(out / "vllm/m/other.py", os.X_OK)


@pytest.fixture
def old_tree(make):
    """A tree that an interrupted build must leave as it is."""
    out, _ = make()
    (out / "old").write_text("")
    return files_in(out)


def alone_in_its_folder(out: Path) -> bool:
    return list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("step", ["_unpack", "apply_overlay", "version_module"])
def test_an_interruption_leaves_the_old_tree(make, out, old_tree, monkeypatch, step):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compose_module, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        make()
    monkeypatch.undo()
    assert files_in(out) == old_tree
    assert alone_in_its_folder(out)


def test_a_full_disk_while_swapping_leaves_the_old_tree(
    make, out, old_tree, monkeypatch
):
    rename = Path.rename

    def fail(self, target):
        if self.name == "tree":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ForkError, match="No space left on device"):
        make()
    assert files_in(out) == old_tree


def test_a_full_disk_is_said_in_one_line(make, out, old_tree, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(ForkError) as refusal:
        make()
    assert str(refusal.value) == f"cannot compose into {out}: No space left on device"
    assert files_in(out) == old_tree
    assert alone_in_its_folder(out)


def test_the_command_composes_and_prints_what_it_laid(tmp_path):
    """The library alone needs no wheel, so this runs anywhere."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tools.fork.compose", "--target", "empty"]
    result = subprocess.run(
        [*command, "--out", str(out)], cwd=REPO_ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("added ")
    assert (out / "exl3/__init__.py").is_file()
    assert not (out / "vllm").exists()
