# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How pins are rewritten, and how a rehearsal reads its tests' results."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tools.fork.errors import ForkError
from tools.fork.pins import REPO_ROOT, load_pins
from tools.rebase.pins import PROJECT, UPSTREAM, put_in_place, rewritten
from tools.rebase.release import NewWheel, Release
from tools.rebase.tests import read_results

JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite>
<testcase classname="tests.a" name="test_good"/>
<testcase classname="tests.a" name="test_wrong">
  <failure message="assert 1 == 2&#10;more">trace</failure></testcase>
<testcase classname="tests.a" name="test_op"><failure message="AttributeError">
  '_OpNamespace' '_C' object has no attribute 'rotary_embedding'</failure></testcase>
<testcase classname="tests.a" name="test_gpu"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="test_setup"><error message="broken"/></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def pins():
    return load_pins(REPO_ROOT / UPSTREAM)


@pytest.fixture
def release(pins):
    wheels = tuple(
        NewWheel(pin, replace(pin, sha256=f"{n}" * 64), Path("x.whl"))
        for n, pin in enumerate(pins.wheels)
    )
    return Release("9.9.0", "torch==8.8.0", wheels)


def test_the_forks_own_pins_can_be_rewritten(tmp_path, pins, release):
    """Of the real files; a line that the rewriting counts on may not be rephrased."""
    texts = rewritten(REPO_ROOT, pins, release)
    (tmp_path / UPSTREAM).write_text(texts[UPSTREAM])
    new = load_pins(tmp_path / UPSTREAM)
    assert (new.version, new.release) == ("9.9.0", 1)
    assert new.replace == {"torch": "torch==8.8.0"}
    assert [pin.sha256[0] for pin in new.wheels] == ["0", "1", "2", "3"]
    assert [pin.name for pin in new.wheels] == [pin.name for pin in pins.wheels]
    old_lines = (REPO_ROOT / UPSTREAM).read_text().splitlines()
    changed = [
        new
        for old, new in zip(old_lines, texts[UPSTREAM].splitlines(), strict=True)
        if old != new
    ]
    assert len(changed) in (6, 7)  # `release` may be 1 already
    assert '"torch==8.8.0"' in texts[PROJECT]


@pytest.mark.parametrize("times", [0, 2])
def test_a_line_that_is_not_there_once_is_refused(tmp_path, pins, release, times):
    text = (REPO_ROOT / UPSTREAM).read_text()
    line = f'\nversion = "{pins.version}"\n'
    (tmp_path / UPSTREAM).write_text(text.replace(line, line * times, 1))
    (tmp_path / PROJECT).write_text((REPO_ROOT / PROJECT).read_text())
    with pytest.raises(ForkError, match=rf"^UPSTREAM.toml: has .* {times} times"):
        rewritten(tmp_path, pins, release)


@pytest.mark.parametrize("full_at", [UPSTREAM, PROJECT])
def test_a_full_disk_leaves_the_old_pins(tmp_path, monkeypatch, full_at):
    for name in (UPSTREAM, PROJECT):
        (tmp_path / name).write_text("old")
    write_text = Path.write_text

    def fill(self, text, *args, **kwargs):
        if self.name == f"{full_at}.new":
            write_text(self, text[:1])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(self, text, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(ForkError, match="No space left on device"):
        put_in_place(tmp_path, {UPSTREAM: "new", PROJECT: "new"})
    monkeypatch.undo()
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {UPSTREAM: "old", PROJECT: "old"}


def test_results_are_counted_and_the_absent_ops_kept_apart(tmp_path):
    results = tmp_path / "tests.xml"
    results.write_text(JUNIT)
    tests = read_results(results, stands_in=True)
    assert (tests.passed, tests.skipped) == (1, 1)
    assert tests.failed == {
        "tests.a::test_wrong": "assert 1 == 2",
        "tests.b::test_setup": "broken",
    }
    assert list(tests.compiled) == ["tests.a::test_op"]
    # With a wheel for the CPU the same words are a failure.
    assert "tests.a::test_op" in read_results(results, stands_in=False).failed


def test_a_run_without_tests_is_a_failure(tmp_path):
    results = tmp_path / "tests.xml"
    results.write_text("<testsuites><testsuite/></testsuites>")
    assert read_results(results, stands_in=True).failed == {"pytest": "no test was run"}
