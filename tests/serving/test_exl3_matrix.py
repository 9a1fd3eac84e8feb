# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The rest of the packs, families and rank counts, which take long to start."""

import pytest

from tests.packs import LINEARS, Format, write_pack
from tests.serving.conftest import WIDTHS
from tests.serving.generate import MTP, Case, run
from tests.serving.oracle import compare, load_reference, widen

TOLERANCE = 0.01  # as in test_exl3_logprobs.py

DRAFT = {"speculative_config": MTP}
COMPILED = {"enforce_eager": False}
# No two ranks can share 7 or 5 experts evenly.
EP2 = {"tensor_parallel_size": 2, "enable_expert_parallel": True}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # A slice of 256 cut in two, and a slice of 128 for each rank.
        pytest.param("two ranks", {"tensor_parallel_size": 4}, id="cut slices"),
        pytest.param("four ranks", {"tensor_parallel_size": 4}, id="four slices"),
        pytest.param("shared vectors", {"tensor_parallel_size": 2}, id="shared"),
        pytest.param("draft alone", {"tensor_parallel_size": 2}, id="draft"),
        pytest.param("every kind", {"tensor_parallel_size": 2}, id="every kind"),
        pytest.param("every format", EP2, id="experts on two ranks"),
        pytest.param("two ranks", EP2, id="slices, experts on two ranks"),
        pytest.param("padded", {"tensor_parallel_size": 2}, id="padded"),
        pytest.param("two ranks", COMPILED, id="compiled"),
        pytest.param("every kind", COMPILED, id="every kind, compiled"),
    ],
)
def test_a_pack_is_its_twin(packs, name, options):
    (result,) = run(Case(str(packs[name].path), {**options, **DRAFT}))
    assert result.error is None
    assert compare(packs.reference(name), result.completions) < TOLERANCE


@pytest.mark.parametrize("ranks", [None, 2], ids=["plain", "rank-sliced"])
def test_every_family(tmp_path, ranks):
    families = ["deepseek_v2", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "qwen3_moe"]
    unequal = {"deepseek_v32", "glm4_moe", "glm4_moe_lite"}  # what `widen` can hold
    packs = {
        family: write_pack(
            tmp_path / family,
            model_type=family,
            trunk={*LINEARS, "head"},
            formats=[Format(4), Format(5, "mul1"), Format(3)],
            ranks=ranks,
            widths=WIDTHS if family in unequal else None,
        )
        for family in families
    }
    results = run(*(Case(str(pack.path)) for pack in packs.values()))
    for (family, pack), result in zip(packs.items(), results, strict=True):
        assert result.error is None, family
        twin = pack.twin
        if family in unequal:
            twin = widen(twin, twin.with_name(f"{family}-widened"))
        reference = load_reference(twin)
        assert compare(reference, result.completions) < TOLERANCE, family
