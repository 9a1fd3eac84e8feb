# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Measures a pack against its BF16 checkpoint on the held-out text.

    python -m tools.demo_model.compare examples/demo-glm-dsa \
        examples/demo-glm-dsa-exl3 --work-dir build/demo_model

Both run as the torch module in float32, the pack with the weights that the reference
decoder makes of its trellises.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.data import Data
from tools.demo_model.load import load_checkpoint
from tools.demo_model.model import DemoModel


@dataclass(frozen=True)
class Comparison:
    """A model beside its reference, on one text.

    Attributes:
        bits_per_byte: Of the model.
        bits_per_byte_ratio: Of the model, over the reference's.
        kl: Mean divergence of the model's next-token distribution from the
            reference's, in nats a token.
        top1: Share of tokens at which both have the same first choice.
        mtp_agreement: Share of the model's drafts that are its own greedy choice, the
            text being given.
        reference_mtp_agreement: The reference's.
    """

    bits_per_byte: float
    bits_per_byte_ratio: float
    kl: float
    top1: float
    mtp_agreement: float
    reference_mtp_agreement: float


class Outputs(NamedTuple):
    """What a model says of one text."""

    logprobs: Tensor  # of every next token, float32 [tokens - 1, vocab]
    right: Tensor  # whether each draft is the trunk's greedy choice, bool [tokens - 2]


@torch.no_grad()
def outputs(model: DemoModel, tokens: Tensor) -> Outputs:
    """Runs `model` over the token ids `[tokens]` of a text."""
    hidden = model.trunk(tokens[None, :-1])
    logits = model.logits(hidden)[0]
    draft = model.logits(model.draft(hidden[:, :-1], tokens[None, 1:-1]))[0]
    right = draft.argmax(-1) == logits[1:].argmax(-1)
    return Outputs(logits.log_softmax(-1), right)


def compare(
    reference: Sequence[Outputs],
    model: DemoModel,
    texts: Sequence[Tensor],
    num_bytes: int,
) -> Comparison:
    """Runs a model over texts that its reference has read.

    Args:
        reference: The reference's `outputs` of each text.
        model: The model that is compared.
        texts: Token ids of each text, no longer than the model's positions; the first
            token is an end of text.
        num_bytes: UTF-8 bytes of all texts.
    """
    # Nats of the reference and the model, their right drafts, divergence, same choices.
    sums = torch.zeros(6, dtype=torch.float64)
    for text, expected in zip(texts, reference, strict=True):
        found = outputs(model, text)
        same = found.logprobs.argmax(-1) == expected.logprobs.argmax(-1)
        sums += torch.stack(
            [
                F.nll_loss(expected.logprobs, text[1:], reduction="sum"),
                F.nll_loss(found.logprobs, text[1:], reduction="sum"),
                expected.right.sum(),
                found.right.sum(),
                F.kl_div(
                    found.logprobs, expected.logprobs, reduction="sum", log_target=True
                ),
                same.sum(),
            ]
        )
    tokens = sum(len(text) - 1 for text in texts)
    drafts = tokens - len(texts)
    reference_nats, nats, reference_right, right, kl, same_choices = sums.tolist()
    return Comparison(
        bits_per_byte=nats / math.log(2) / num_bytes,
        bits_per_byte_ratio=nats / reference_nats,
        kl=kl / tokens,
        top1=same_choices / tokens,
        mtp_agreement=right / drafts,
        reference_mtp_agreement=reference_right / drafts,
    )


def heldout_windows(data: Data, longest: int) -> list[Tensor]:
    """The held-out chapters, cut where a model's positions end."""
    return [window for chapter in data.heldout for window in chapter.split(longest)]


def compare_folders(source: Path, pack: Path, work_dir: Path) -> Comparison:
    """Compares two checkpoints on all held-out chapters."""
    data = Data(work_dir)
    reference, model = load_checkpoint(source), load_checkpoint(pack)
    texts = heldout_windows(data, model.config.max_position_embeddings)
    expected = [outputs(reference, text) for text in texts]
    return compare(expected, model, texts, data.heldout_bytes)


def main() -> None:
    """Prints the comparison of two folders as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    found = compare_folders(args.reference, args.pack, args.work_dir)
    print(json.dumps(asdict(found), indent=2))


if __name__ == "__main__":
    main()
