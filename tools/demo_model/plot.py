# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The loss curves of a run as an SVG picture."""

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
