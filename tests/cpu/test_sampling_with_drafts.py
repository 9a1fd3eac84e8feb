# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Sampling with a draft on the CPU follows the target's distribution."""

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata

REQUESTS, VOCAB = 20_000, 8


@pytest.fixture(scope="module", autouse=True)
def kernels():
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_a_request_s_value_is_repeated_for_its_tokens(dtype):
    values = torch.tensor([0.0, 0.75, 3.5, 2.0]).to(dtype)
    counts = [2, 0, 3, 1]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    expanded = rejection_sampler.expand_batch_to_tokens(values, ends, 6, 0, 1)
    expected = [
        1 if value == 0 else value
        for value, count in zip(values.tolist(), counts, strict=True)
        for _ in range(count)
    ]
    assert expanded.dtype == dtype
    assert expanded.tolist() == expected


def metadata(temperature):
    fields = dict.fromkeys(SamplingMetadata.__dataclass_fields__)
    fields |= {
        "temperature": torch.full((REQUESTS,), temperature),
        "all_greedy": False,
        "all_random": True,
        "generators": {},
    }
    return SamplingMetadata(**fields)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("drafted", [0, 3], ids=["likeliest", "unlikely"])
def test_tokens_are_distributed_as_the_target(temperature, drafted):
    torch.manual_seed(0)
    # Token 0 is the likeliest; the logits fall by half a unit each.
    logits = -0.5 * torch.arange(VOCAB, dtype=torch.float32)
    sampling = metadata(temperature)
    ends = torch.arange(1, REQUESTS + 1, dtype=torch.int32)
    constrained = rejection_sampler.apply_sampling_constraints(
        logits.repeat(REQUESTS, 1), ends, sampling
    )
    tokens = rejection_sampler.rejection_sample(
        torch.full((REQUESTS,), drafted, dtype=torch.int32),
        [1] * REQUESTS,
        1,
        ends,
        None,
        constrained,
        torch.zeros(REQUESTS, 1, dtype=torch.int32),
        sampling,
    )
    seen = torch.bincount(tokens[:, 0], minlength=VOCAB) / REQUESTS
    target = (logits / temperature).softmax(0)
    # Half the summed difference of two distributions. Over 20,000 draws of 8 values it
    # is 0.006 on average and 0.012 once in a million.
    assert 0.5 * (seen - target).abs().sum() < 0.012
