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
#: A trunk whose own draft is dense, with a draft that comes from another folder.
ELSEWHERE = "shared vectors"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder with a rank-sliced draft and nothing else, and the draft's twin."""
    folder = tmp_path_factory.mktemp("elsewhere")
    pack = write_pack(
        folder / "pack",
        trunk=(),
        draft={"experts"},
        formats=[Format(4)],
        ranks=2,
        widths=[0, 8, 8, 6],
        seed=1,
    )
    return draft_alone(pack.path, folder / "draft"), pack.twin


@pytest.fixture(scope="module")
def together(packs, elsewhere):
    cases = {name: Case(str(packs[name].path), TOGETHER[name]) for name in TOGETHER}
    for name in DRAFTS:
        cases[f"{name}, twin"] = Case(str(packs[name].twin), DRAFT)
    draft, twin_draft = elsewhere
    for name, model, its in (
        ("elsewhere", packs[ELSEWHERE].path, draft),
        ("elsewhere, twin", packs[ELSEWHERE].twin, twin_draft),
    ):
        options = {"speculative_config": {**MTP, "model": str(its)}}
        cases[name] = Case(str(model), options)
    return dict(zip(cases, run(*cases.values()), strict=True))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_pack_is_its_twin(packs, together, name):
    check(packs, name, together[name])


@pytest.mark.parametrize("name", [*DRAFTS, "elsewhere"])
def test_a_draft_is_accepted_like_its_twins(together, name):
    pack, twin = together[name], together[f"{name}, twin"]
    assert 0 < pack.accepted < pack.drafted
    # Of some 55 drafts, two whose best tokens are nearly equal may turn out otherwise.
    rates = [result.accepted / result.drafted for result in (pack, twin)]
    assert rates[0] == pytest.approx(rates[1], abs=0.04)


def test_a_draft_comes_from_another_folder(packs, together):
    check(packs, ELSEWHERE, together["elsewhere"])
    # It is another draft than the trunk's own.
    assert together["elsewhere"].accepted != together[ELSEWHERE].accepted


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
