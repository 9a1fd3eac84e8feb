# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Measures plain EXL3 of the equal demo model by codebook and bits.

    python -m tools.demo_model.quality examples/demo-glm-dsa \
        --work-dir build/demo_model --plot docs/quality/divergence.svg

Fifteen packs are encoded and measured, which takes hours. Packs and figures stay in
the work folder, so a run that was stopped goes on. Prints the table of
`docs/quality.md`.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from exl3.format.constants import CODEBOOKS
from tools.demo_model.compare import compare, heldout_windows, outputs
from tools.demo_model.load import load_checkpoint
from tools.demo_model.plot import divergence_curves
from tools.demo_model.quantize import Quantizer, uniform

BITS = (4, 3, 2, 5, 6)
FIGURES_FILE = "quality.json"

TABLE_HEAD = """\
| bits | codebook | bits per byte | over BF16's | KL, nats a token | same first choice \
| right drafts |
|---|---|---|---|---|---|---|"""


def measure(source: Path, work_dir: Path) -> dict[str, dict[str, float]]:
    """Figures by `codebook-bits`, as `Comparison` names them."""
    figures_file = work_dir / FIGURES_FILE
    figures = json.loads(figures_file.read_text()) if figures_file.exists() else {}
    quantizer = Quantizer(source, work_dir)
    data, reference = quantizer.data, load_checkpoint(source)
    texts = heldout_windows(data, reference.config.max_position_embeddings)
    expected = [outputs(reference, text) for text in texts]
    for bits in BITS:
        for label, codebook in CODEBOOKS.items():
            name = f"{label}-{bits}"
            pack = work_dir / "quality" / name
            if name in figures:
                continue
            if not pack.exists():
                quantizer.write(uniform(bits, codebook), pack)
            found = compare(expected, load_checkpoint(pack), texts, data.heldout_bytes)
            figures[name] = asdict(found)
            figures_file.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def table(figures: dict[str, dict[str, float]]) -> str:
    """One row a pack."""
    rows = [TABLE_HEAD]
    for bits in sorted(BITS):
        for label in CODEBOOKS:
            row = figures[f"{label}-{bits}"]
            rows.append(
                f"| {bits} | {label} | {row['bits_per_byte']:.4f} | "
                f"{row['bits_per_byte_ratio']:.4f} | {row['kl']:.5f} | "
                f"{row['top1']:.2%} | {row['mtp_agreement']:.2%} |"
            )
    return "\n".join(rows)


def main() -> None:
    """Measures, draws and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    args = parser.parse_args()
    figures = measure(args.source, args.work_dir)
    points = {
        label: {bits: figures[f"{label}-{bits}"]["kl"] for bits in BITS}
        for label in CODEBOOKS
    }
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    args.plot.write_text(divergence_curves(points))
    print(table(figures))


if __name__ == "__main__":
    main()
