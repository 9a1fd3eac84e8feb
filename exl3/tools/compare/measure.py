# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What is measured of two models that predict the same tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from exl3.tools.shared.progress import progress_bar

#: Log-probabilities that are compared at once: 256 MB of them in float32, a model.
_AT_ONCE = 1 << 26


class Scores(NamedTuple):
    """The log-probabilities that a model gives for the next token at some positions.

    Attributes:
        logprobs: `[positions, k]`, in no order; -inf where there is no token.
        tokens: Which tokens these are, int64 `[positions, k]`, -1 for none, and among
            them the best one and the text's own. None: `logprobs` has the whole
            vocabulary, in order.
    """

    logprobs: Tensor
    tokens: Tensor | None = None

    def of(self, wanted: Tensor) -> Tensor:
        """The log-probabilities of tokens `[positions, n]`; NaN where not given."""
        if self.tokens is None:
            found = self.logprobs.gather(1, wanted.clamp(min=0))
            return found.masked_fill(wanted < 0, math.nan)
        tokens, order = self.tokens.sort(1)
        at = torch.searchsorted(tokens, wanted).clamp(max=tokens.shape[1] - 1)
        found = self.logprobs.gather(1, order.gather(1, at))
        is_known = (tokens.gather(1, at) == wanted) & (wanted >= 0)
        return found.masked_fill(~is_known, math.nan)

    def best(self) -> Tensor:
        """The most probable token of each position."""
        at = self.logprobs.argmax(1)
        return at if self.tokens is None else self.tokens[torch.arange(len(at)), at]


class Side(Protocol):
    """One of the two models."""

    name: str
    longest: int  # tokens that it reads at once
    vocabulary: int | None  # log-probabilities of a position; None: only some

    def read(self, windows: Sequence[Tensor]) -> None:
        """Runs the model over windows of token ids."""

    def scores(self, window: int, begin: int, end: int) -> Scores:
        """What it gives at positions `[begin, end)` of a window that it has read."""


@dataclass(frozen=True)
class Comparison:
    """What two models give for each predicted token of a text.

    Attributes:
        nats_a: A's negative log-probability of each token, float64 `[tokens]`.
        nats_b: B's.
        kl: Divergence of B's next-token distribution from A's at each.
        same: Whether both have the same first choice.
        positions: Tokens before each in its window.
        is_bound: Whether `kl` is a lower bound, since some tokens are counted as one.
    """

    nats_a: Tensor
    nats_b: Tensor
    kl: Tensor
    same: Tensor
    positions: Tensor
    is_bound: bool


def compare(a: Side, b: Side, windows: Sequence[Tensor]) -> Comparison:
    """Runs two models over windows of token ids, and compares what they give."""
    for side in (a, b):
        side.read(windows)
    sizes = [side.vocabulary for side in (a, b) if side.vocabulary]
    rows = max(1, _AT_ONCE // max(sizes, default=1))
    parts: list[tuple[Tensor, ...]] = []
    with progress_bar(len(windows), "window", "comparing") as bar:
        for index, window in enumerate(windows):
            targets = window[1:]
            for begin in range(0, len(targets), rows):
                end = min(begin + rows, len(targets))
                of_a, of_b = (side.scores(index, begin, end) for side in (a, b))
                parts.append(
                    (
                        *_measure(of_a, of_b, targets[begin:end]),
                        torch.arange(begin + 1, end + 1),
                    )
                )
            bar.update()
    nats_a, nats_b, kl, same, positions = (
        torch.cat(column) for column in zip(*parts, strict=True)
    )
    return Comparison(nats_a, nats_b, kl, same, positions, is_bound=len(sizes) < 2)


def _measure(a: Scores, b: Scores, targets: Tensor) -> tuple[Tensor, ...]:
    """Nats of both, divergence and same choices, of some positions."""
    nats = [-scores.of(targets[:, None])[:, 0].double() for scores in (a, b)]
    return *nats, divergence(a, b), a.best() == b.best()


def divergence(a: Scores, b: Scores) -> Tensor:
    """KL(A || B) at each position, float64 `[positions]`.

    Tokens for which not both give a log-probability are counted as one. Joining
    tokens never raises the divergence, so what is found is a lower bound of it.
    """
    if a.tokens is None and b.tokens is None:
        return _terms(a.logprobs, b.logprobs).sum(1)
    tokens = b.tokens if a.tokens is None else a.tokens
    assert tokens is not None
    of_a, of_b = a.of(tokens), b.of(tokens)
    is_known = ~(of_a.isnan() | of_b.isnan())
    of_a = of_a.masked_fill(~is_known, -math.inf).double()
    of_b = of_b.masked_fill(~is_known, -math.inf).double()
    # What is left is a difference from 1, of log-probabilities in float32.
    rest = [(1 - side.exp().sum(1)).clamp(min=1e-7).log() for side in (of_a, of_b)]
    return _terms(of_a, of_b).sum(1) + _terms(*rest)


def _terms(of_a: Tensor, of_b: Tensor) -> Tensor:
    """Each p log(p / q) of log-probabilities, in float64; 0 where p is 0."""
    of_a, of_b = of_a.double(), of_b.double()
    terms = of_a.exp() * (of_a - of_b)
    return terms.masked_fill(of_a == -math.inf, 0.0)
