# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What `exl3 compare` prints."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from exl3.tools.compare.measure import Comparison, Side
from exl3.tools.compare.windows import WindowedText

#: Shares of the tokens, of which it is told what their divergence is below.
_SHARES = (0.5, 0.9, 0.99, 1.0)


def as_json(found: Comparison, text: WindowedText, a: Side, b: Side) -> dict[str, Any]:
    """The comparison as plain data; divergences in nats a token."""
    return {
        "text": str(text.file),
        "windows": len(text.windows),
        "window": text.window,
        "tokens": text.num_tokens,
        "bytes": text.num_bytes,
        "a": {"name": a.name, "bits_per_byte": _bits(found.nats_a, text)},
        "b": {"name": b.name, "bits_per_byte": _bits(found.nats_b, text)},
        "kl": {
            "direction": "KL(A || B)",
            "mean": found.kl.mean().item(),
            "quantiles": {str(share): _quantile(found, share) for share in _SHARES},
            "is_lower_bound": found.is_bound,
        },
        "top1_agreement": found.same.double().mean().item(),
    }


def lines(found: Comparison, text: WindowedText, a: Side, b: Side) -> Iterator[str]:
    """The comparison as text."""
    count = len(text.windows)
    windows = f"{count} windows" if count > 1 else "a window"
    yield (
        f"{text.file}: {text.num_tokens:,} tokens, {text.num_bytes:,} bytes, in "
        f"{windows} of {text.window} tokens"
    )
    yield ""
    width = max(len(a.name), len(b.name), 13)
    bits = [_bits(nats, text) for nats in (found.nats_a, found.nats_b)]
    change = 100 * (bits[1] / bits[0] - 1) if bits[0] else math.nan
    yield f"   {'':{width}}  bits per byte"
    yield f"A  {a.name:{width}}  {bits[0]:13.4f}"
    yield f"B  {b.name:{width}}  {bits[1]:13.4f}  {change:+.2f} %"
    yield ""
    at_least = "at least " if found.is_bound else ""
    at_most = ", ".join(
        f"{share:.0%} {_quantile(found, share):.3g}" for share in _SHARES
    )
    yield f"KL(A || B)         {at_least}{found.kl.mean().item():.6f} nats a token"
    yield f"                   at most, by share of tokens: {at_most}"
    yield f"same first choice  {100 * found.same.double().mean().item():.2f} %"
    if found.is_bound:
        yield ""
        yield (
            "A server gives some log-probabilities only: tokens that not both models "
            "gave one for"
        )
        yield "are counted as one, so the divergence is a lower bound."


def _quantile(found: Comparison, share: float) -> float:
    """The divergence that a share of the tokens does not exceed."""
    return found.kl.kthvalue(max(1, math.ceil(share * len(found.kl)))).values.item()


def _bits(nats: Tensor, text: WindowedText) -> float:
    return nats.sum().item() / math.log(2) / text.num_bytes
