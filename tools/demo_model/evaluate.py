# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What the demo model's card says: held-out bits per byte, drafts, samples."""

import math

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.model import DemoModel
from tools.demo_model.tokenizer import EOS_ID


@torch.no_grad()
def heldout_sums(model: DemoModel, chapters: list[Tensor]) -> Tensor:
    """Sums over chapters, from which `summary` computes what is measured.

    Args:
        model: The model, with its `compute_dtype`.
        chapters: Token ids of whole chapters, each between two end-of-text tokens.

    Returns:
        Float64 `[3]`: nats of all tokens after the first, right drafts, drafts. A
        draft is right if the MTP layer's greedy choice for the token after the
        next is the trunk's own, the text being given (teacher forcing).
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for chapter in chapters:
        for tokens in chapter.split(model.config.max_position_embeddings):
            hidden = model.trunk(tokens[None, :-1])
            logits = model.logits(hidden)[0]
            draft = model.logits(model.draft(hidden[:, :-1], tokens[None, 1:-1]))[0]
            right = draft.argmax(-1) == logits[1:].argmax(-1)
            sums[0] += F.cross_entropy(logits, tokens[1:], reduction="sum")
            sums[1] += right.sum()
            sums[2] += len(right)
    return sums


def summary(sums: Tensor, num_bytes: int) -> dict[str, float]:
    """Bits per byte and the share of right drafts.

    Args:
        sums: `heldout_sums` of all chapters.
        num_bytes: UTF-8 bytes of the chapters.
    """
    nats, right, drafts = sums.tolist()
    return {
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "mtp_agreement": right / drafts,
    }


@torch.no_grad()
def complete(
    model: DemoModel,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """Continues `prompt`, greedily at temperature 0; returns the new text.

    Without a cache, so for a sentence or two.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    start = len(ids)
    while len(ids) < start + max_tokens:
        logits = model.logits(model.trunk(torch.tensor([ids])))[0, -1]
        if temperature:
            chances = (logits / temperature).softmax(-1)
            token = int(torch.multinomial(chances, 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == EOS_ID:
            break
        ids.append(token)
    return tokenizer.decode(ids[start:])
