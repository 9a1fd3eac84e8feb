# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Draws how the divergence of two models is spread over a text."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.tools.compare.measure import Comparison
from exl3.tools.shared.figure import BLACK, BLUE, ORANGE, panels

#: Bins of equal numbers of positions, in which at least so many tokens lie.
_MOST_BINS, _LEAST_IN_BIN = 32, 32
#: Below this a divergence is rounding, in float32.
_FLOOR = 1e-7


def draw(found: Comparison, file: Path, a: str, b: str) -> None:
    """Draws two panels: the share of tokens by divergence, and it by position.

    Args:
        found: What was measured.
        file: Where to; its suffix tells the format.
        a: The reference's name.
        b: The other's.

    Raises:
        ToolError: matplotlib is missing, or does not know the format.
    """
    names = f"A: {Path(a).name if '://' not in a else a}"
    names += f"      B: {Path(b).name if '://' not in b else b}"
    with panels(file, names, 2, (11, 4.2)) as (left, right):
        _by_share(left, found)
        _by_position(right, found)


def _by_share(axes: Any, found: Comparison) -> None:
    """The share of tokens whose divergence exceeds a value."""
    kl = found.kl.clamp(min=_FLOOR)
    for chosen, color, label in (
        (found.same, BLUE, "same first choice"),
        (~found.same, ORANGE, "another first choice"),
    ):
        values = kl[chosen].sort(descending=True).values
        if len(values):
            share = torch.arange(1, len(values) + 1) / len(kl)
            axes.plot(values, share, color=color, label=label, linewidth=1.5)
    mean = found.kl.mean().item()
    axes.axvline(
        max(mean, _FLOOR),
        color=BLACK,
        linestyle="--",
        linewidth=1,
        label=f"mean, {mean:.3g}",
    )
    axes.set(xscale="log", yscale="log", ylim=(0.5 / len(kl), 1.3))
    at_least = " (lower bound)" if found.is_bound else ""
    axes.set_xlabel(f"KL(A || B) of a token, nats{at_least}")
    axes.set_ylabel("share of tokens that exceed it")
    axes.legend(frameon=False, loc="lower left")


def _by_position(axes: Any, found: Comparison) -> None:
    """Mean and middle of the divergence, over the tokens that a token is told from."""
    order = found.positions.argsort(stable=True)
    bins = max(1, min(_MOST_BINS, len(order) // _LEAST_IN_BIN))
    parts = order.tensor_split(bins)
    x = [found.positions[part].double().mean().item() for part in parts]
    kl = found.kl.clamp(min=_FLOOR)

    def of_each(share: float) -> list[float]:
        return [_quantile(kl[part], share) for part in parts]

    axes.fill_between(
        x, of_each(0.1), of_each(0.9), color=BLUE, alpha=0.2, label="80 % of tokens"
    )
    axes.plot(x, of_each(0.5), color=BLUE, label="median")
    means = [kl[part].mean().item() for part in parts]
    axes.plot(x, means, color=BLACK, marker="o", markersize=3, label="mean")
    axes.set(yscale="log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.15)  # room for the legend
    axes.set_xlabel("tokens before it in its window")
    axes.set_ylabel("KL(A || B) of a token, nats")
    axes.legend(frameon=False, loc="upper right", ncols=3)


def _quantile(values: Tensor, share: float) -> float:
    return values.quantile(share).item()
