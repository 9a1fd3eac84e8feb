# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Measures plain EXL3 of the equal demo model by codebook and bits.

    python -m tools.demo_model.quality examples/demo-glm-dsa docs/quality.md \
        --work-dir build/demo_model

Fifteen packs are encoded and measured, which takes an hour on an idle core. Packs and
figures stay in the work folder, so a run that was stopped goes on. Fills in the table
of the page, and draws `PLOT_FILE` beside it.
"""

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path

from exl3 import cli
from exl3.format.constants import CODEBOOKS
from tools.demo_model.compare import Comparison, compare, heldout_windows, outputs
from tools.demo_model.data import Data
from tools.demo_model.load import load_checkpoint
from tools.demo_model.packs import TEXT
from tools.demo_model.plot import divergence_curves

BITS = (2, 3, 4, 5, 6)
PLOT_FILE = "quality.svg"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TABLE_HEAD = """\
| bits | codebook | bits per byte | over BF16's | KL, nats a token | same first choice \
| right drafts |
|---|---|---|---|---|---|---|"""


Figures = dict[tuple[int, str], Comparison]
"""By bits and codebook."""


def measure(source: Path, work_dir: Path) -> Figures:
    """Encodes and measures what is not yet measured."""
    folder = work_dir / "quality"
    folder.mkdir(exist_ok=True)
    data, reference = Data(work_dir), load_checkpoint(source)
    texts = heldout_windows(data, reference.config.max_position_embeddings)
    expected = [outputs(reference, text) for text in texts]
    found = {}
    for bits, label in itertools.product(BITS, CODEBOOKS):
        pack = folder / f"{label}-{bits}"
        if not pack.exists():
            command = ["quantize", str(source), str(pack), "--text", str(TEXT)]
            command += ["--bits", str(bits), "--codebook", label, "--resume"]
            if cli.main(command) != 0:
                raise SystemExit(1)
        file = pack.with_suffix(".json")
        if not file.exists():
            figures = compare(
                expected, load_checkpoint(pack), texts, data.heldout_bytes
            )
            file.write_text(json.dumps(asdict(figures), indent=2) + "\n")
        found[bits, label] = Comparison(**json.loads(file.read_text()))
    return found


def table(figures: Figures) -> str:
    """One row a pack, and BF16's."""
    first = next(iter(figures.values()))
    bf16 = first.bits_per_byte / first.bits_per_byte_ratio
    drafts = first.reference_mtp_agreement
    rows = [TABLE_HEAD]
    for (bits, label), found in sorted(figures.items()):
        rows.append(
            f"| {bits} | {label} | {found.bits_per_byte:.4f} | "
            f"{found.bits_per_byte_ratio:.4f} | {found.kl:.5f} | "
            f"{found.top1:.1%} | {found.mtp_agreement:.1%} |"
        )
    rows.append(f"| 16 | BF16 | {bf16:.4f} | 1 | 0 | 100% | {drafts:.1%} |")
    return "\n".join(rows)


def filled(page: str, rows: str) -> str:
    """The page with another table between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{rows}\n{END}{tail}"


def main() -> None:
    """Measures, fills in and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("page", type=Path, help="has the table between two marks")
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    figures = measure(args.source, args.work_dir)
    points = {
        label: {bits: figures[bits, label].kl for bits in BITS} for label in CODEBOOKS
    }
    (args.page.parent / PLOT_FILE).write_text(divergence_curves(points))
    args.page.write_text(filled(args.page.read_text(), table(figures)))


if __name__ == "__main__":
    main()
