# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The curves of a run and of a comparison as SVG pictures."""

import math

WIDTH, HEIGHT, MARGIN = 640, 320, 48

# Field of the log, label, colour.
CURVES = (
    ("loss", "training loss, nats a token", "#1f77b4"),
    ("mtp", "MTP loss, nats a token", "#9467bd"),
    ("bits_per_byte", "held-out bits per byte", "#d62728"),
)

SVG_HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
font-family="sans-serif" font-size="11">
<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"""


def text(x: float, y: float, label: str, colour: str) -> str:
    """A right-aligned label."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="end"'
    return f'<text {place} fill="{colour}">{label}</text>'


def loss_curves(log: list[dict]) -> str:
    """Draws every field of `CURVES` over the steps.

    Args:
        log: Lines of a run's log; each has `step` and some of the fields.
    """
    last = max(line["step"] for line in log)
    top = max(line[field] for field, _, _ in CURVES for line in log if field in line)
    inner_width, inner_height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def place(step: float, value: float) -> str:
        x = MARGIN + inner_width * step / last
        return f"{x:.1f},{HEIGHT - MARGIN - inner_height * value / top:.1f}"

    axes = f"{place(0, top)} {place(0, 0)} {place(last, 0)}"
    right, bottom = WIDTH - MARGIN, HEIGHT - MARGIN
    parts = [
        SVG_HEAD,
        f'<polyline fill="none" stroke="black" points="{axes}"/>',
        text(right, bottom + 16, f"step {last}", "black"),
    ]
    for value in range(int(top) + 1):
        y = bottom - inner_height * value / top
        parts.append(text(MARGIN - 8, y + 4, str(value), "black"))
    for row, (field, label, colour) in enumerate(CURVES):
        points = " ".join(
            place(line["step"], line[field]) for line in log if field in line
        )
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
        parts.append(text(right, MARGIN + 14 * row, label, colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


# Codebook, colour.
CODEBOOKS = (("3inst", "#1f77b4"), ("mcg", "#2ca02c"), ("mul1", "#d62728"))


def divergence_curves(points: dict[str, dict[int, float]]) -> str:
    """Draws the KL divergence over the bits, one curve a codebook, on a log scale.

    Args:
        points: Nats a token by codebook and bits.
    """
    values = [kl for curve in points.values() for kl in curve.values()]
    bits = sorted({bits for curve in points.values() for bits in curve})
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    left, right, bottom = MARGIN + 24, WIDTH - MARGIN, HEIGHT - MARGIN

    def x_of(number: int) -> float:
        return left + (right - left) * (number - bits[0]) / (bits[-1] - bits[0])

    def y_of(kl: float) -> float:
        share = (math.log10(kl) - low) / (high - low)
        return bottom - (bottom - MARGIN) * share

    title = "KL divergence from BF16, nats a token (held-out text), by bits a weight"
    parts = [SVG_HEAD, text(right, MARGIN - 24, title, "black")]
    for number in bits:
        parts.append(text(x_of(number) + 3, bottom + 16, str(number), "black"))
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(f'<path stroke="#ddd" d="M{left},{y:.1f}H{right}"/>')
        parts.append(text(left - 8, y + 4, f"{10.0**power:g}", "black"))
    for row, (codebook, colour) in enumerate(CODEBOOKS):
        curve = sorted(points[codebook].items())
        places = " ".join(f"{x_of(n):.1f},{y_of(kl):.1f}" for n, kl in curve)
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{places}"/>')
        for number, kl in curve:
            place = f'cx="{x_of(number):.1f}" cy="{y_of(kl):.1f}"'
            parts.append(f'<circle {place} r="3" fill="{colour}"/>')
        parts.append(text(right, MARGIN + 14 * row, codebook, colour))
    return "\n".join([*parts, "</svg>"]) + "\n"
