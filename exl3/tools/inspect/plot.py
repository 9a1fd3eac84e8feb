# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Draws the widths and bits of a checkpoint's layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl3.tools.shared.errors import ToolError

#: Told apart in any kind of colour vision (Okabe and Ito, 2008).
_EXPERTS, _LINEARS, _MEAN = "#0072B2", "#D55E00", "#000000"
_MIXED = "#CC79A7"  # experts whose matrices differ
_OTHER = "#BBBBBB"  # what is not EXL3
_DRAFT = "#E4E4E4"


def draw(report: Mapping[str, Any], file: Path, title: str) -> None:
    """Draws two panels over the layers: routed experts by their bits, and mean bits.

    Args:
        report: See `exl3.tools.inspect.report`.
        file: Where to; its suffix tells the format.
        title: The checkpoint's name.

    Raises:
        ToolError: matplotlib is missing, or does not know the format.
    """
    try:
        import matplotlib
    except ImportError:
        raise ToolError(
            "--plot needs matplotlib, which is not installed; pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = [layer for layer in report["layers"] if layer["layer"] is not None]
    if not layers:
        raise ToolError("--plot: the checkpoint has no layers to draw")
    width = min(16.0, max(7.5, 0.17 * len(layers) + 2.5))
    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(width, 6), layout="constrained"
    )
    figure.suptitle(title)
    _widths(upper, layers)
    _bits(lower, layers, report["bits_per_weight"])
    for axes in (upper, lower):
        _drafts(axes, layers)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        # Beside the bars, which may fill all of the panel; in the order of the stack.
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.005, 1),
            frameon=False,
            reverse=axes is upper,
        )
    try:
        figure.savefig(file, dpi=150)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ToolError(f"--plot {file}: {reason}") from None
    finally:
        pyplot.close(figure)


def _widths(axes: Any, layers: list[Mapping[str, Any]]) -> None:
    """Stacked bars: each layer's routed experts by their bits."""
    from matplotlib import colormaps

    by_tier = [_by_tier(layer["experts"]) for layer in layers]
    tiers = sorted({tier for counts in by_tier for tier in counts}, key=_order)
    rated = [tier for tier in tiers if tier[0].isdigit()]
    # cividis: even lightness steps, alike for all kinds of colour vision.
    shades = colormaps["cividis"]
    colors = {
        tier: shades(0.15 + 0.7 * at / max(1, len(rated) - 1))
        for at, tier in enumerate(rated)
    }
    colors["mixed"] = _MIXED
    x = [layer["layer"] for layer in layers]
    bottom = [0] * len(layers)
    for tier in tiers:
        heights = [counts.get(tier, 0) for counts in by_tier]
        axes.bar(
            x,
            heights,
            bottom=bottom,
            width=0.85,
            color=colors.get(tier, _OTHER),
            edgecolor="white",
            linewidth=0.3,
            label=f"K{tier}" if tier in rated else tier,
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("routed experts")
    axes.set_xlim(min(x) - 0.7, max(x) + 0.7)
    axes.set_ylim(0, max(1, *bottom) * 1.08)


def _bits(axes: Any, layers: list[Mapping[str, Any]], mean: float | None) -> None:
    """Mean bits per weight of the experts and of all EXL3 matrices of a layer."""
    series = (
        ("bits_per_weight", "all EXL3 matrices", "D", _LINEARS, 6),
        ("expert_bits_per_weight", "routed experts", "o", _EXPERTS, 3),
    )
    for name, label, marker, color, size in series:
        points = [(at["layer"], at[name]) for at in layers if at[name] is not None]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                marker=marker,
                markersize=size,
                markerfacecolor="white" if size > 4 else color,
                linewidth=1,
                color=color,
                label=label,
            )
    if mean is not None:
        axes.axhline(
            mean, color=_MEAN, linewidth=1, linestyle="--", label=f"mean, {mean:.2f}"
        )
    axes.set_xlabel("layer")
    axes.set_ylabel("bits per weight")
    axes.set_ylim(0, _top(layers))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _top(layers: list[Mapping[str, Any]]) -> float:
    bits = [layer["bits_per_weight"] or 0 for layer in layers]
    bits += [layer["expert_bits_per_weight"] or 0 for layer in layers]
    return max(4.0, *bits) * 1.1


def _drafts(axes: Any, layers: list[Mapping[str, Any]]) -> None:
    """Shades the draft layers, and names them above the panel."""
    drafts = [layer["layer"] for layer in layers if layer["kind"] == "MTP"]
    if not drafts:
        return
    first, last = min(drafts) - 0.5, max(drafts) + 0.5
    axes.axvspan(first, last, color=_DRAFT, zorder=0, linewidth=0)
    axes.text(
        (first + last) / 2,
        1.0,
        "MTP",
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="bottom",
        fontsize="small",
    )


def _by_tier(experts: Mapping[str, int]) -> dict[str, int]:
    """Experts by bits; those whose matrices differ are counted as mixed."""
    counts: dict[str, int] = {}
    for bits, count in experts.items():
        tier = "mixed" if "/" in bits else bits
        counts[tier] = counts.get(tier, 0) + count
    return counts


def _order(tier: str) -> tuple[float, str]:
    """By bits, then mixed ones, then those that are not EXL3."""
    if tier[0].isdigit():
        return float(tier), tier
    return (99.0 if tier == "mixed" else 100.0), tier
