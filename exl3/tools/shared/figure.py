# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Pictures by matplotlib, which is an optional dependency."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exl3.tools.shared.errors import ToolError

#: Told apart in any kind of colour vision (Okabe and Ito, 2008).
BLUE, ORANGE, BLACK = "#0072B2", "#D55E00", "#000000"


def check_plot(file: Path) -> None:
    """Refuses a picture before the long work that it is to show.

    Raises:
        ToolError: matplotlib is missing or does not know the format, or there is no
            such folder.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ToolError(
            "--plot needs matplotlib, which is not installed; pip install matplotlib"
        ) from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in known:
        raise ToolError(
            f"--plot {file}: the ending names no format; use {', '.join(sorted(known))}"
        )
    if not file.parent.is_dir():
        raise ToolError(f"--plot {file}: there is no folder {file.parent}; make it")


@contextmanager
def panels(file: Path, title: str, columns: int, size: tuple[float, float]) -> Iterator:
    """Gives the axes of a figure, to draw in, and then saves it.

        with panels(file, "widths", 2, (10, 4)) as (left, right):
            left.plot(...)

    Args:
        file: Where to; its suffix tells the format.
        title: Above all panels.
        columns: Panels, side by side.
        size: Inches.

    Raises:
        ToolError: See `check_plot`.
    """
    check_plot(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained")
    try:
        figure.suptitle(title)
        all_axes: list[Any] = [axes] if columns == 1 else list(axes)
        yield all_axes
        for panel in all_axes:
            panel.grid(color="#DDDDDD", linewidth=0.6)
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, dpi=150)
    finally:
        pyplot.close(figure)
