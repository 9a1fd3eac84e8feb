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
#: Of 4 groups of 4 experts, 2 of each group in layer 1 and 3 in layer 2.
KEPT_GROUPED = {
    1: [0, 1, 4, 6, 9, 10, 13, 14],
    2: [0, 1, 3, 4, 5, 6, 8, 10, 11, 12, 14, 15],
}


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
    groups = {"experts": 16, "n_group": 4, "topk_group": 2}
    grouped = write_checkpoint(folder / "of-groups", seed=1, **groups)
    unequal = prune(source, folder / "unequal", KEPT)
    results = run(
        Case(str(source)),
        Case(prune(source, folder / "whole", {})),
        Case(unequal),
        Case(unequal, {"speculative_config": MTP}),
        Case(prune(pack.path, folder / "pruned-pack", KEPT), exact=True),
        Case(prune(grouped, folder / "grouped", KEPT_GROUPED)),
    )
    for result in results:
        assert result.error is None
    names = ("source", "whole", "unequal", "unequal, draft", "pack", "grouped")
    sources = {
        "unequal": source,
        "unequal, draft": source,
        "pack": pack.twin,
        "grouped": grouped,
    }
    return sources, dict(zip(names, results, strict=True))


def reference(source, kept):
    model = load_reference(source)
    for layer in 1, 2:
        bias = model.model.layers[layer].mlp.gate.e_score_correction_bias
        gone = [expert for expert in range(len(bias)) if expert not in kept[layer]]
        bias[gone] = float("-inf")
    return model


@pytest.mark.slow
def test_all_experts_kept_say_the_same(served):
    _, results = served
    assert results["whole"].completions == results["source"].completions
    assert results["unequal"].completions != results["source"].completions


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unequal", "unequal, draft", "pack", "grouped"])
def test_the_rest_is_as_if_the_others_were_never_chosen(served, name):
    sources, results = served
    kept = KEPT_GROUPED if name == "grouped" else KEPT
    expected = reference(sources[name], kept)
    assert compare(expected, results[name].completions) < TOLERANCE


@pytest.mark.slow
def test_the_draft_still_drafts(served):
    result = served[1]["unequal, draft"]
    assert 0 < result.accepted < result.drafted
