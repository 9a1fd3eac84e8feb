# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A graft that is stopped is finished or undone, and nobody serves half of it."""

import random
import shutil
import signal
import time
from copy import copy
from functools import partial

import pytest

from exl3.checkpoint.plan import read_checkpoint, read_config
from exl3.cli import main
from exl3.format.errors import FileError
from tests.exl3.interruptions import Run, contents, first_shard, killed_before, refusal
from tests.packs import Format, write_pack

EXPERTS = "model.layers.2.mlp.experts"
SMALL = {"layers": 2, "experts": 3, "ranks": 2}


class Case:
    """BASE and OVERLAY, what BASE is before and after, and what a stop left of it."""

    def __init__(self, folder):
        self.folder = folder
        self.base, self.overlay = folder / "base", folder / "overlay"
        # Other widths and bits, so that all kinds of files change.
        write_pack(self.base, draft=(), formats=[Format(4)], shards=2, **SMALL)
        write_pack(
            self.overlay,
            formats=[Format(3), Format(4)],
            **{**SMALL, "experts": None, "widths": [0, 3, 2]},
        )
        self.before = contents(self.base)
        done = shutil.copytree(self.base, folder / "done")
        assert self.graft(done).code == 0
        self.after = contents(done)
        start = time.monotonic()
        assert self.revert(done).code == 0
        assert self.graft(done).code == 0
        self.seconds = (time.monotonic() - start) / 2

    def graft(self, base=None, overlay=None, wrap=None, **limits):
        arguments = ["graft-mtp", str(base or self.base), str(overlay or self.overlay)]
        return Run(wrap or main, arguments, **limits).end()

    def revert(self, base=None, wrap=None, **limits):
        arguments = ["graft-mtp", str(base or self.base), "--revert"]
        return Run(wrap or main, arguments, **limits).end()

    def check_state(self):
        """It is served as it was, or as it shall be, or refused by name."""
        try:
            plan = read_checkpoint(self.base, read_config(self.base)).plan
        except FileError as error:
            assert "half changed" in str(error)
            return "half"
        found = contents(self.base)
        state = "after" if EXPERTS in plan.experts else "before"
        for name, content in getattr(self, state).items():
            assert found[name] == content
        return state

    def finish_either_way(self, draw):
        """Runs it again, or takes it back, and then the other."""
        self.check_state()
        if draw.random() < 0.5:
            ended = self.graft()
            assert ended.code == 0 or "run it with --revert first" in ended.error
            if ended.code == 0 or "already" in ended.error:
                assert contents(self.base) == self.after
        ended = self.revert()
        assert ended.code == 0 or "nothing was grafted" in ended.error
        assert contents(self.base) == self.before


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("graft"))


@pytest.fixture
def case(written, tmp_path):
    """The case, with a BASE for one test, which leaves it as it was."""
    case = copy(written)
    case.base = shutil.copytree(written.base, tmp_path / "case")
    yield case
    assert contents(case.base) == case.before


@pytest.mark.slow
def test_killed_at_20_random_moments(case):
    draw = random.Random(0)
    kills = 0
    while kills < 20:
        command = ["graft-mtp", str(case.base), str(case.overlay)]
        if kills % 2:
            assert case.graft().code == 0
            command = ["graft-mtp", str(case.base), "--revert"]
        run = Run(main, command)
        run.process.join(draw.uniform(0, case.seconds))
        run.process.kill()
        ended = run.end()
        assert ended.code in (0, -signal.SIGKILL), ended.error
        kills += ended.code != 0
        case.finish_either_way(draw)


@pytest.mark.parametrize("revert", [False, True], ids=["graft", "revert"])
def test_killed_before_every_operation_on_a_file(case, revert):
    draw, states = random.Random(0), set()
    for operation in range(1, 1000):
        if revert:
            assert case.graft().code == 0
        wrap = partial(killed_before, case.base, operation, main)
        ended = case.revert(wrap=wrap) if revert else case.graft(wrap=wrap)
        assert ended.code in (0, -signal.SIGKILL), ended.error
        if ended.code != 0:
            states.add(case.check_state())
        case.finish_either_way(draw)
        if ended.code == 0:
            break
    # The last operation commits: all before it leave the old state or none.
    assert states == {"half", "after" if revert else "before"}


def test_a_stopped_graft_is_only_finished_with_its_overlay(case, tmp_path):
    other = shutil.copytree(case.overlay, tmp_path / "other")
    for operation in range(1, 1000, 4):
        ended = case.graft(wrap=partial(killed_before, case.base, operation, main))
        if case.check_state() == "half":
            break
        case.revert()
    assert ended.code != 0
    assert "was stopped; run it with that again" in refusal(case.graft(overlay=other))
    assert case.graft().code == 0
    assert contents(case.base) == case.after
    assert case.revert().code == 0


@pytest.mark.parametrize("num_bytes", [1_000, 100_000, 300_000])
def test_no_space(case, num_bytes):
    line = refusal(case.graft(file_bytes=num_bytes))
    assert "File too large" in line
    assert str(case.base) in line


def test_a_read_only_folder(case):
    case.base.chmod(0o555)
    try:
        line = refusal(case.graft(as_owner=True))
    finally:
        case.base.chmod(0o755)
    assert "Permission denied" in line
    assert str(case.base) in line


def test_links_that_lead_to_themselves(case, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    assert "loop" in refusal(case.graft(base=loop))
    assert "loop" in refusal(case.graft(overlay=loop))
    for side in "base", "overlay":
        folder = shutil.copytree(getattr(case, side), tmp_path / side)
        shard = first_shard(folder)
        shard.unlink()
        shard.symlink_to(shard.name)
        assert shard.name in refusal(case.graft(**{side: folder}))


@pytest.mark.parametrize("side", ["base", "overlay"])
def test_an_empty_shard(case, tmp_path, side):
    folder = shutil.copytree(getattr(case, side), tmp_path / side)
    first_shard(folder).write_bytes(b"")
    before = contents(folder)
    assert first_shard(folder).name in refusal(case.graft(**{side: folder}))
    assert contents(folder) == before


@pytest.mark.parametrize("side", ["base", "overlay"])
def test_nothing_there(case, tmp_path, side):
    assert "nowhere" in refusal(case.graft(**{side: tmp_path / "nowhere"}))
    (tmp_path / "bare").mkdir()
    assert "config.json" in refusal(case.graft(**{side: tmp_path / "bare"}))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"state": "done"}', '{"state": 3}'], ids=repr
)
def test_a_damaged_record(case, tmp_path, content):
    base = shutil.copytree(case.base, tmp_path / "base")
    (base / "exl3-graft.json").write_text(content)
    assert "exl3-graft.json" in refusal(case.graft(base=base))
    assert "exl3-graft.json" in refusal(case.revert(base=base))


def test_a_record_cannot_name_files_elsewhere(case, tmp_path):
    base = shutil.copytree(case.base, tmp_path / "base")
    (tmp_path / "precious").write_text("x")
    record = '{"state": "preparing", "added": ["../precious"], "replaced": [], '
    (base / "exl3-graft.json").write_text(record + '"about": {}}')
    assert "is no record of a graft" in refusal(case.revert(base=base))
    assert (tmp_path / "precious").exists()


def test_one_at_a_time(case):
    import fcntl
    import os

    descriptor = os.open(case.base, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "another graft-mtp is changing it" in refusal(case.graft())
    os.close(descriptor)
