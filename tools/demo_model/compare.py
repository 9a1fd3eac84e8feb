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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

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


@torch.no_grad()
def outputs(model: DemoModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of every next token `[T - 1, vocab]`, and right drafts.

    Args:
        model: The model.
        tokens: A text's token ids `[T]`.
    """
    hidden = model.trunk(tokens[None, :-1])
    logits = model.logits(hidden)[0]
    draft = model.logits(model.draft(hidden[:, :-1], tokens[None, 1:-1]))[0]
    return logits.log_softmax(-1), draft.argmax(-1) == logits[1:].argmax(-1)


def compare(
    reference: DemoModel, model: DemoModel, texts: Iterable[Tensor], num_bytes: int
) -> Comparison:
    """Runs both models over `texts`.

    Args:
        reference: The model to compare with.
        model: The model that is compared.
        texts: Token ids of each text, the first token an end of text.
        num_bytes: UTF-8 bytes of all texts.
    """
    nats = torch.zeros(2, dtype=torch.float64)
    right = torch.zeros(2, dtype=torch.float64)
    kl = same = tokens = drafts = 0.0
    for text in texts:
        for window in text.split(model.config.max_position_embeddings):
            (expected, expected_right), (found, found_right) = (
                outputs(each, window) for each in (reference, model)
            )
            nats[0] += F.nll_loss(expected, window[1:], reduction="sum")
            nats[1] += F.nll_loss(found, window[1:], reduction="sum")
            right += torch.stack([expected_right.sum(), found_right.sum()])
            kl += float(F.kl_div(found, expected, reduction="sum", log_target=True))
            same += float((found.argmax(-1) == expected.argmax(-1)).sum())
            tokens += len(found)
            drafts += len(found_right)
    reference_bits, bits = (nats / math.log(2) / num_bytes).tolist()
    reference_agreement, agreement = (right / drafts).tolist()
    return Comparison(
        bits_per_byte=bits,
        bits_per_byte_ratio=bits / reference_bits,
        kl=kl / tokens,
        top1=same / tokens,
        mtp_agreement=agreement,
        reference_mtp_agreement=reference_agreement,
    )


def main() -> None:
    """Prints the comparison of two folders as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    data = Data(args.work_dir)
    models = load_checkpoint(args.reference), load_checkpoint(args.pack)
    found = compare(*models, data.heldout, data.heldout_bytes)
    print(json.dumps(asdict(found), indent=2))


if __name__ == "__main__":
    main()
