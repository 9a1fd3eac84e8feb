# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The shape of a published checkpoint: 20 layers, 724 experts, 10 different widths.

Its experts are rank-sliced, at 3 and 4 bits. The widths are as published; the hidden
sizes are not, so that it starts in seconds.
"""

import math

import pytest

from tests.checkpoints import GLM_52
from tests.damage import with_json
from tests.packs import Format, write_pack
from tests.serving.generate import Case, run
from tests.serving.oracle import compare, load_reference, widen

#: Token ids of prefills of 1, 2, 5, 8 and 9 tokens: around a block and a tile.
PREFILLS = [list(range(20 * i, 20 * i + n)) for i, n in enumerate((1, 2, 5, 8, 9), 1)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return write_pack(
        tmp_path_factory.mktemp("published") / "pack",
        model_type="glm_moe_dsa",
        trunk={"experts"},
        formats=[Format(3), Format(4)],
        ranks=2,
        widths=GLM_52,
        layers=len(GLM_52),
        mtp=0,
        hidden=128,
        first_k_dense_replace=3,
        shards=4,
    )


@pytest.fixture(scope="module")
def results(pack, tmp_path_factory):
    wrong = tmp_path_factory.mktemp("wrong") / "pack"

    def widen_layer_9(config):
        config["n_routed_experts_per_layer"][9] += 1

    return run(
        Case(str(pack.path), max_tokens=8, prompts=PREFILLS, exact=True),
        Case(str(with_json(pack.path, wrong, widen_layer_9))),
    )


def test_it_passes_prefills(pack, results):
    served = results[0]
    assert served.error is None
    for completion in served.completions:
        assert all(map(math.isfinite, completion.logprobs))
        assert len(set(completion.tokens)) > 1, "one token over and over"
    reference = load_reference(widen(pack.twin, pack.twin.with_name("widened")))
    assert compare(reference, served.completions, PREFILLS) < 1e-3


def test_a_width_off_by_one_is_refused(results):
    error = results[1].error
    assert error is not None
    says = ["n_routed_experts_per_layer", "layer 9", "57", "56"]
    lines = [line for line in error.splitlines() if all(part in line for part in says)]
    assert len(lines) == 1, error
