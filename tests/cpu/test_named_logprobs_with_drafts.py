# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Requests name the tokens whose log-probabilities they want, also with drafts."""

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

VOCAB = 16
#: Draft tokens of each request.
DRAFTS = 2


@pytest.fixture(scope="module", autouse=True)
def kernels():
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


@pytest.fixture(scope="module")
def logits():
    """Those of three requests: two drafts and a token more each."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3 * (DRAFTS + 1), VOCAB, generator=generator)


def sample(logits, named, best):
    """Greedy tokens of three requests, whose second draft token is wrong in the first.

    Returns:
        What `parse_output` makes of the sampler's output: tokens and logprobs.
    """
    likeliest = logits.argmax(-1).view(3, -1)
    drafts = likeliest[:, :DRAFTS].clone()
    drafts[0, 1] = (drafts[0, 1] + 1) % VOCAB
    every = torch.arange(len(logits)).view(3, -1)
    counts = torch.arange(1, 4)
    metadata = SpecDecodeMetadata(
        draft_token_ids=drafts.flatten().to(torch.int32),
        num_draft_tokens=[DRAFTS] * 3,
        cu_num_draft_tokens=(DRAFTS * counts).to(torch.int32),
        cu_num_sampled_tokens=((DRAFTS + 1) * counts).to(torch.int32),
        target_logits_indices=every[:, :DRAFTS].flatten().to(torch.int32),
        bonus_logits_indices=every[:, DRAFTS].to(torch.int32),
        logits_indices=every.flatten().to(torch.int32),
    )
    fields = dict.fromkeys(SamplingMetadata.__dataclass_fields__)
    fields |= {
        "all_greedy": True,
        "all_random": False,
        "generators": {},
        "max_num_logprobs": best,
        "no_penalties": True,
        "output_token_ids": [[], [], []],
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
        "logprob_token_ids": named,
        "spec_token_ids": drafts.tolist(),
    }
    sampler = RejectionSampler(Sampler())
    output = sampler(metadata, None, logits.clone(), SamplingMetadata(**fields))
    return sampler.parse_output(
        output.sampled_token_ids, VOCAB, logprobs_tensors=output.logprobs_tensors
    )


@pytest.mark.parametrize("best", [None, 0, 2, 5])
def test_each_request_gets_what_it_asks_for(logits, best):
    named = {0: [3, 11, 7], 2: [0]}
    tokens, found = sample(logits, named, best)
    assert [len(each) for each in tokens] == [2, 3, 3]
    logprobs = logits.log_softmax(-1).view(3, -1, VOCAB)
    for request in range(3):
        positions = len(tokens[request])
        rows = found.slice_request(request, positions)
        for position, token in enumerate(tokens[request]):
            expected = logprobs[request, position]
            wanted = named.get(request)
            if wanted is None:
                wanted = expected.topk(best or 0).indices.tolist()
            ids = rows.logprob_token_ids[position][: 1 + len(wanted)].tolist()
            values = rows.logprobs[position][: 1 + len(wanted)]
            assert ids == [token, *wanted]
            assert values == pytest.approx(expected[ids].numpy(), abs=1e-6)
            rank = (expected >= expected[token]).sum()
            assert rows.sampled_token_ranks[position] == rank


def test_without_names_nothing_changes(logits):
    tokens, found = sample(logits, None, 2)
    assert [len(each) for each in tokens] == [2, 3, 3]
    assert found.logprobs.shape == (8, 3)
    assert sample(logits, None, None)[1] is None
