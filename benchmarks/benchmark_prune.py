# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
r"""Unequal widths against equal ones of the same size, on the demo model.

    python benchmarks/benchmark_prune.py examples/demo-glm-dsa docs/pruning.md \
        --text examples/calibration.txt --work-dir build/demo_model

Prunes to each budget in several ways, reads the held-out chapters with each result, and
prints bits per byte. Nothing is trained again. Fills in the table of the page, and
draws `PLOT_FILE` beside it. Checkpoints and figures stay in the work folder, so a run
that was stopped goes on.
"""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from exl3 import cli
from exl3.tools.compare.local import LocalModel
from exl3.tools.prune.layers import read_source
from exl3.tools.shared.figure import BLACK, BLUE, ORANGE, panels
from tools.demo_model.data import Data

RATIOS = (0.5, 0.625, 0.75)
PLOT_FILE = "pruning.svg"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
EQUAL, UNEQUAL, FREQUENCY = "equal, REAP", "unequal, REAP", "unequal, frequency"
COLOURS = {EQUAL: BLACK, UNEQUAL: BLUE, FREQUENCY: ORANGE}

Rows = dict[tuple[float, str], tuple[list[int], float]]
"""By budget and way: the widths, and bits per byte."""


def bits_per_byte(folder: Path, windows: list[Tensor], num_bytes: int) -> float:
    """What a checkpoint needs for the tokens of a text.

    Args:
        folder: The checkpoint.
        windows: Token ids `[tokens]`; the first of each is given.
        num_bytes: UTF-8 bytes of the text.
    """
    model = LocalModel(folder)
    model.read(windows)
    nats = 0.0
    for index, window in enumerate(windows):
        scores = model.scores(index, 0, len(window) - 1)
        nats -= scores.of(window[1:, None]).double().sum().item()
    return nats / math.log(2) / num_bytes


def ways(width: int, ratio: float) -> dict[str, list[str]]:
    """The options of each way to prune to a budget."""
    return {
        EQUAL: ["--widths", str(width)],
        UNEQUAL: ["--keep-ratio", str(ratio)],
        FREQUENCY: ["--keep-ratio", str(ratio), "--saliency", "frequency"],
    }


def measure(source: Path, text: Path, work_dir: Path) -> Rows:
    """Prunes and measures what is not yet measured."""
    folder = work_dir / "pruning"
    folder.mkdir(exist_ok=True)
    data = Data(work_dir)
    windows = [part for chapter in data.heldout for part in chapter.split(2048)]
    layers = read_source(source).of_kind(is_draft=False)
    rows: Rows = {}

    def add(ratio: float, way: str, pruned: Path) -> None:
        file = folder / f"{pruned.name}.json"
        if not file.exists():
            found = bits_per_byte(pruned, windows, data.heldout_bytes)
            file.write_text(json.dumps(found) + "\n")
        widths = [at.width for at in read_source(pruned).of_kind(is_draft=False)]
        rows[ratio, way] = widths, json.loads(file.read_text())
        print(ratio, way, *rows[ratio, way], flush=True)

    add(1.0, "unpruned", source)
    statistics = folder / "statistics.json"
    for ratio in RATIOS:
        for way, options in ways(round(ratio * layers[0].width), ratio).items():
            pruned = folder / f"{way.replace(', ', '-')}-{ratio}"
            if not pruned.exists():
                known = ["--text", str(text), "--save-statistics", str(statistics)]
                if statistics.exists():
                    known = ["--statistics", str(statistics)]
                if cli.main(["prune", str(source), str(pruned), *options, *known]):
                    raise SystemExit(1)
            add(ratio, way, pruned)
    return rows


def table(rows: Rows) -> str:
    """One line for each way and budget."""
    (whole,) = (bits for (_, way), (_, bits) in rows.items() if way == "unpruned")
    lines = ["| kept | way | widths | bits per byte | over the whole model's |"]
    lines.append("|---|---|---|---|---|")
    for (ratio, way), (widths, bits) in rows.items():
        over = "-" if bits == whole else f"{bits / whole - 1:+.1%}"
        lines.append(
            f"| {ratio:.1%} | {way} | {', '.join(map(str, widths))} | {bits:.4f} | "
            f"{over} |"
        )
    return "\n".join(lines)


def draw(rows: Rows, file: Path) -> None:
    """Draws bits per byte over the share of experts that stay."""
    whole = rows[1.0, "unpruned"][1]
    with panels(file, "Held-out text, by routed experts kept", 1, (7, 4.2)) as (axes,):
        for way, colour in COLOURS.items():
            curve = [(ratio, rows[ratio, way][1]) for ratio in RATIOS] + [(1.0, whole)]
            axes.plot(*zip(*curve), marker="o", color=colour, label=way)
        axes.set(xlabel="share of experts kept", ylabel="bits per byte")
        axes.set_xticks([*RATIOS, 1.0])
        axes.legend(frameon=False)


def filled(page: str, lines: Iterable[str]) -> str:
    """The page with other lines between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([head + BEGIN, *lines, END]) + tail


def main() -> None:
    """Measures, fills in and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("page", type=Path, help="has the table between two marks")
    parser.add_argument("--text", type=Path, required=True, help="not held out")
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    rows = measure(args.source, args.text, args.work_dir)
    draw(rows, args.page.parent / PLOT_FILE)
    args.page.write_text(filled(args.page.read_text(), [table(rows)]))


if __name__ == "__main__":
    main()
