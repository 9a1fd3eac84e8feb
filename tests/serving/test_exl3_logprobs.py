# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Served EXL3 checkpoints compute what their dense twins compute.

A twin holds the weights that the reference decoder makes of the pack, and transformers
runs it in float32. So a wrong tile, scale, slice, bitrate or expert shows as a wrong
log-probability, whatever the engine itself would make of the twin.
"""

import pytest

from tests.damage import draft_alone
from tests.packs import Format, write_pack
from tests.serving.generate import MTP, Case, run
from tests.serving.oracle import compare

#: The largest difference of a log-probability over all greedy tokens. Any two engines
#: of a pack then agree within twice as much.
TOLERANCE = 0.01

DRAFT = {"speculative_config": MTP}
COMPILED = {"enforce_eager": False}
TP2 = {"tensor_parallel_size": 2}


def check(packs, name, result):
    assert result.error is None
    assert compare(packs.reference(name), result.completions) < TOLERANCE


# Engines of one process, which share its import of vLLM.
TOGETHER = {
    "every format": DRAFT,
    "two ranks": DRAFT,
    "four ranks": {},
    "shared vectors": DRAFT,
    "draft alone": DRAFT,
    "every kind": DRAFT,
    "other names": {},
    "padded": DRAFT,
}
#: Packs whose draft is checked against the twin's, in engines of their own.
DRAFTS = ["every format", "two ranks"]


@pytest.fixture(scope="module")
def together(packs):
    cases = [Case(str(packs[name].path), options) for name, options in TOGETHER.items()]
    twins = [Case(str(packs[name].twin), DRAFT) for name in DRAFTS]
    results = run(*cases, *twins)
    names = [*TOGETHER, *(f"{name}, twin" for name in DRAFTS)]
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_pack_is_its_twin(packs, together, name):
    check(packs, name, together[name])


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_is_accepted_like_its_twins(together, name):
    pack, twin = together[name], together[f"{name}, twin"]
    assert 0 < pack.accepted < pack.drafted
    assert (pack.accepted, pack.drafted) == (twin.accepted, twin.drafted)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "every format", {**TP2, **COMPILED, **DRAFT}, id="plain, compiled"
        ),
        pytest.param("two ranks", {**TP2, **DRAFT}, id="two slices"),
        pytest.param("four ranks", {**TP2, **DRAFT}, id="four slices"),
    ],
)
def test_on_two_ranks(packs, name, options):
    (result,) = run(Case(str(packs[name].path), options))
    check(packs, name, result)
    assert 0 < result.accepted < result.drafted


def test_a_draft_from_another_folder(packs, tmp_path):
    """It is rank-sliced, and the trunk beside it has a dense draft of its own."""
    trunk = packs["shared vectors"]
    other = write_pack(
        tmp_path / "other",
        trunk=(),
        draft={"experts"},
        formats=[Format(4)],
        ranks=2,
        widths=[0, 8, 8, 6],
        seed=1,
    )
    draft = {**MTP, "model": str(draft_alone(other.path, tmp_path / "draft"))}
    twin_draft = {**MTP, "model": str(other.twin)}
    result, twin, own = run(
        Case(str(trunk.path), {"speculative_config": draft}),
        Case(str(trunk.twin), {"speculative_config": twin_draft}),
        Case(str(trunk.path), DRAFT),
    )
    check(packs, "shared vectors", result)
    assert (result.accepted, result.drafted) == (twin.accepted, twin.drafted)
    assert result.accepted != own.accepted
