# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A full disk, while composing or fetching, leaves what was there before."""

import resource
from contextlib import contextmanager

import pytest

from tools.fork.compose import compose
from tools.fork.errors import ForkError
from tools.fork.wheel import cache_folder, obtain_wheel, sha256_of

#: More than any file may hold while the disk is full.
CONTENT = "".join(f"{number:x}\n" for number in range(1 << 18))
LIMIT = 1 << 16


@contextmanager
def full_disk():
    """No file may grow beyond `LIMIT` in the meantime, nor may a child's.

    It is what a full disk does, an error in the middle of writing a file, and needs no
    right to mount one.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def wheel(make_wheel):
    return make_wheel({"vllm/small.py": "", "vllm/large.py": CONTENT})


@pytest.mark.parametrize("old", [False, True], ids=["at first", "over an old tree"])
@pytest.mark.parametrize("link", [False, True])
def test_composing_leaves_the_old_tree_or_none(
    wheel, pin_wheel, make_repo, tmp_path, link, old
):
    pins, out = pin_wheel(wheel), tmp_path / "build" / "composed"
    repo = make_repo({"exl3/__init__.py": "OLD = 1\n"})
    if old:
        compose("cpu", out, link=False, repo=repo, pins=pins)
        (repo / "exl3" / "__init__.py").write_text("NEW = 1\n")

    with full_disk(), pytest.raises(ForkError) as refusal:
        compose("cpu", out, link=link, repo=repo, pins=pins)
    assert str(refusal.value) == f"cannot compose into {out}: File too large"
    assert list(out.parent.iterdir()) == ([out] if old else [])
    if old:
        assert (out / "exl3" / "__init__.py").read_text() == "OLD = 1\n"
        assert (out / "vllm" / "large.py").read_text() == CONTENT

    compose("cpu", out, link=link, repo=repo, pins=pins)
    assert (out / "vllm" / "large.py").read_text() == CONTENT


def test_fetching_leaves_an_empty_cache(wheel, pin_wheel, index, monkeypatch):
    (pin,) = pin_wheel(wheel).wheels
    monkeypatch.delenv("VLLM_UPSTREAM_WHEEL")
    index(wheel.parent)

    with full_disk(), pytest.raises(ForkError, match="File too large"):
        obtain_wheel(pin, "0.32.0")
    assert not [path for path in cache_folder().rglob("*") if path.is_file()]

    assert sha256_of(obtain_wheel(pin, "0.32.0")) == pin.sha256
