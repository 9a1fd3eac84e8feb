# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The rejection sampler, also for requests that name the tokens they ask about.

See docs/upstream/logprob-token-ids-with-drafts.md.
"""

from dataclasses import replace

import torch

from vllm.fork import extend
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample import rejection_sampler_upstream as upstream
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class RejectionSampler(upstream.RejectionSampler):
    """Upstream's, which knows the log-probabilities of the best tokens only."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Upstream's `forward`, where requests may name tokens.

        Such a request gets the log-probabilities of those tokens at each of its
        positions. They are taken from those of the whole vocabulary.
        """
        named = sampling_metadata.logprob_token_ids
        if not named:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        best = sampling_metadata.max_num_logprobs or 0
        output = super().forward(
            metadata,
            draft_probs,
            logits,
            replace(
                sampling_metadata,
                logprob_token_ids=None,
                max_num_logprobs=logits.shape[-1],
            ),
        )
        positions = output.sampled_token_ids.shape[-1]
        rows = {
            row: tokens
            for request, tokens in named.items()
            for row in range(request * positions, (request + 1) * positions)
        }
        assert output.logprobs_tensors is not None
        return replace(
            output, logprobs_tensors=_named(output.logprobs_tensors, rows, best)
        )


def _named(
    every: LogprobsTensors, rows: dict[int, list[int]], best: int
) -> LogprobsTensors:
    """Keeps named tokens in some rows, and the best ones in the others.

    Args:
        every: The sampled token, then the vocabulary from the best token to the
            worst: [num_rows, 1 + vocab_size].
        rows: The named tokens by row.
        best: How many of the best are kept in the other rows.

    Returns:
        As many columns as the longest row needs. In a shorter one the rest is not
        read.
    """
    columns = 1 + max(best, *map(len, rows.values()))
    token_ids = every.logprob_token_ids[:, :columns].clone()
    logprobs = every.logprobs[:, :columns].clone()
    for row, tokens in rows.items():
        ids = torch.tensor(tokens, device=token_ids.device)
        by_token = torch.empty_like(every.logprobs[row, 1:])
        by_token[every.logprob_token_ids[row, 1:].long()] = every.logprobs[row, 1:]
        token_ids[row, 1 : 1 + len(tokens)] = ids.to(token_ids.dtype)
        logprobs[row, 1 : 1 + len(tokens)] = by_token[ids]
    return LogprobsTensors(token_ids, logprobs, every.selected_token_ranks)


extend(__name__, upstream)
