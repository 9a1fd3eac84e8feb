# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Engines with the CUDA kernels, run by the emulator, against the CPU's kernels.

What a GPU would get is run end to end: tables of experts, virtual experts, expert maps,
shards and the sizes of workspaces.
"""

import pytest

from tests.serving.generate import MTP, Case, run

pytestmark = pytest.mark.slow

#: The largest difference of a log-probability.
TOLERANCE = 0.02
#: Each worker loads the emulated kernels before it builds a model.
EMULATED = {
    "worker_extension_cls": "tests.kernels.emulated.worker.EmulatedKernels",
}
#: The emulator is slow, and an engine tries out its largest batch first.
FEW = {"max_num_batched_tokens": 32, "max_num_seqs": 2}
PROMPTS = [[7], list(range(5, 14))]
DRAFT = {"speculative_config": MTP}

CASES = {
    "every format": DRAFT,
    "two ranks": DRAFT,
    "two ranks, cut": {"tensor_parallel_size": 2},
    "every format, by experts": {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
    },
    "padded": {},
}


def case(packs, name: str, **kernels: str) -> Case:
    path = str(packs[name.partition(",")[0]].path)
    options = {**FEW, **CASES[name], **kernels}
    return Case(path, options, max_tokens=4, prompts=PROMPTS)


@pytest.fixture(scope="module")
def results(packs):
    """By name: with the CPU's kernels, and with the emulated ones."""
    plain = run(*(case(packs, name) for name in CASES))
    emulated = run(*(case(packs, name, **EMULATED) for name in CASES))
    return dict(zip(CASES, zip(plain, emulated)))


@pytest.mark.parametrize("name", CASES)
def test_logprobs_agree(results, name):
    plain, emulated = results[name]
    assert plain.error is None and emulated.error is None
    differences = []
    for ours, theirs in zip(emulated.completions, plain.completions, strict=True):
        assert ours.tokens == theirs.tokens
        differences += [abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs)]
    assert max(differences) < TOLERANCE
    # The CPU's kernels again would differ by nothing.
    assert max(differences) > 0
