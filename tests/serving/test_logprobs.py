# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Served tokens are Hugging Face's, whatever the width, the draft or the ranks.

transformers computes the same float32 model by other code. Over 32 greedy tokens the
largest difference seen is 1e-5; a wrong rotary embedding, expert or width gives 0.1 or
more, so the bound of 1e-3 tells the two apart with room on both sides.
"""

import pytest

from tests.serving.generate import MTP, Case, run
from tests.serving.oracle import compare

TOLERANCE = 1e-3

DRAFT = {"speculative_config": MTP}
COMPILED = {"enforce_eager": False}
TP2 = {"tensor_parallel_size": 2}
EP2 = {**TP2, "enable_expert_parallel": True}
PP2 = {"pipeline_parallel_size": 2}


def case(checkpoints, model_type, *, unequal, **options):
    return Case(str(checkpoints.path(model_type, unequal=unequal)), options)


def check(checkpoints, model_type, result, *, unequal):
    assert result.error is None
    reference = checkpoints.reference(model_type, unequal=unequal)
    assert compare(reference, result.completions) < TOLERANCE


# Engines of one process, which share its import of vLLM.
TOGETHER = {
    "deepseek_v3": ("deepseek_v3", False, {}),
    "deepseek_v3, draft": ("deepseek_v3", False, DRAFT),
    "deepseek_v3, unequal": ("deepseek_v3", True, {}),
    "deepseek_v3, unequal, draft": ("deepseek_v3", True, DRAFT),
    "glm_moe_dsa, unequal, draft": ("glm_moe_dsa", True, DRAFT),
}


@pytest.fixture(scope="module")
def together(checkpoints):
    cases = [
        case(checkpoints, model_type, unequal=unequal, **options)
        for model_type, unequal, options in TOGETHER.values()
    ]
    return dict(zip(TOGETHER, run(*cases), strict=True))


@pytest.mark.parametrize("name", TOGETHER)
def test_eager(checkpoints, together, name):
    model_type, unequal, options = TOGETHER[name]
    check(checkpoints, model_type, together[name], unequal=unequal)
    if options:
        # Some drafts are accepted and some are not, so both ways are taken.
        assert 0 < together[name].accepted < together[name].drafted


def test_a_draft_changes_no_token(together):
    for name in ("deepseek_v3", "deepseek_v3, unequal"):
        plain, drafted = together[name], together[f"{name}, draft"]
        for one, other in zip(plain.completions, drafted.completions, strict=True):
            assert one.tokens == other.tokens


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**TP2, **DRAFT}, id="two ranks, draft"),
        pytest.param(PP2, id="two stages"),
        pytest.param({**COMPILED, **DRAFT}, id="compiled, draft"),
    ],
)
def test_unequal_widths_over_processes(checkpoints, options):
    (result,) = run(case(checkpoints, "deepseek_v3", unequal=True, **options))
    check(checkpoints, "deepseek_v3", result, unequal=True)


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(COMPILED, id="compiled"),
        pytest.param(TP2, id="two ranks"),
        pytest.param({**TP2, **COMPILED}, id="two ranks, compiled"),
        pytest.param({**TP2, **COMPILED, **DRAFT}, id="two ranks, compiled, draft"),
        pytest.param({**EP2, **DRAFT}, id="experts on two ranks, draft"),
    ],
)
def test_the_rest_of_the_matrix(checkpoints, options, unequal):
    (result,) = run(case(checkpoints, "deepseek_v3", unequal=unequal, **options))
    check(checkpoints, "deepseek_v3", result, unequal=unequal)


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
def test_every_family_with_a_router_bias(checkpoints, unequal):
    families = ["deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite"]
    results = run(*(case(checkpoints, f, unequal=unequal) for f in families))
    for family, result in zip(families, results, strict=True):
        check(checkpoints, family, result, unequal=unequal)


@pytest.mark.slow
def test_families_without_a_router_bias(checkpoints):
    """transformers cannot hold their unequal form: the widths must at least load."""
    families = ["deepseek_v2", "qwen3_moe"]
    equal = run(*(case(checkpoints, f, unequal=False) for f in families))
    for family, result in zip(families, equal, strict=True):
        check(checkpoints, family, result, unequal=False)
    for result in run(*(case(checkpoints, f, unequal=True) for f in families)):
        assert result.error is None
        assert len(result.completions[0].tokens) == 32
