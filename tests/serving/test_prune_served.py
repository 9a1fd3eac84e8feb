# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What `exl3 prune` writes is served, and says what it should.

The reference is Hugging Face's model of the source, in which the removed experts are
never chosen.
"""

import json

import pytest

from exl3 import cli
from tests.checkpoints import write_checkpoint
from tests.packs import Format, write_pack
from tests.serving.generate import MTP, Case, run
from tests.serving.oracle import compare, load_reference

#: As in test_logprobs: differences seen are 1e-5, those of a wrong expert 0.1.
TOLERANCE = 1e-3
#: Layer 1 keeps 4, layer 2 keeps 6 and the draft 5, of 8 experts.
KEPT = {1: [1, 3, 4, 6], 2: [0, 1, 2, 5, 6, 7], 3: [0, 2, 3, 5, 6]}


def prune(source, out, kept):
    profile = out.with_suffix(".json")
    profile.write_text(json.dumps({"layers": kept}))
    assert cli.main(["prune", str(source), str(out), "--profile", str(profile)]) == 0
    return str(out)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pruned")
    source = write_checkpoint(folder / "source")
    pack = write_pack(folder / "pack", ranks=2, formats=(Format(3), Format(4)))
    unequal = prune(source, folder / "unequal", KEPT)
    results = run(
        Case(str(source)),
        Case(prune(source, folder / "whole", {})),
        Case(unequal),
        Case(unequal, {"speculative_config": MTP}),
        Case(prune(pack.path, folder / "pruned-pack", KEPT), exact=True),
    )
    for result in results:
        assert result.error is None
    names = ("source", "whole", "unequal", "unequal, draft", "pack")
    return source, pack, dict(zip(names, results, strict=True))


def reference(source):
    model = load_reference(source)
    for layer in 1, 2:
        gone = [expert for expert in range(8) if expert not in KEPT[layer]]
        bias = model.model.layers[layer].mlp.gate.e_score_correction_bias
        bias[gone] = float("-inf")
    return model


@pytest.mark.slow
def test_all_experts_kept_say_the_same(served):
    _, _, results = served
    assert results["whole"].completions == results["source"].completions
    assert results["unequal"].completions != results["source"].completions


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unequal", "unequal, draft"])
def test_the_rest_is_as_if_the_others_were_never_chosen(served, name):
    source, _, results = served
    assert compare(reference(source), results[name].completions) < TOLERANCE


@pytest.mark.slow
def test_the_draft_still_drafts(served):
    result = served[2]["unequal, draft"]
    assert 0 < result.accepted < result.drafted


@pytest.mark.slow
def test_a_pack_is_served(served):
    _, pack, results = served
    assert compare(reference(pack.twin), results["pack"].completions) < TOLERANCE
