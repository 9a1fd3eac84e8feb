# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
r"""Speed and error of the EXL3 tile encoder, by bits and codebook.

    python benchmarks/kernels/benchmark_exl3_encoder.py --json encoder.json

Tiles are Gaussian. Speed is that of one thread in its CPU time, which on a busy machine
leaves out what others take: the best of several runs over few tiles. The error is that
of all tiles, over their square, at the scale that a quantizer starts its search with;
from 5 bits on a single weight far out may be a third of it. Other instruction sets:
EXL3_CPU_ISA=avx2, or portable. They give the same tiles.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

from exl3 import ops
from exl3.codec.regularize import INNER_RMS
from exl3.codec.scale import gaussian_scale
from exl3.format.constants import HALF_RATE_WORDS, Codebook, is_legal_rate

WORDS = sorted([*range(16, 129, 16), *HALF_RATE_WORDS])
#: Tiles of a timed run: two batches.
TIMED = 4


def measure(words: int, codebook: Codebook, tiles: int, repeats: int) -> dict:
    """Times and judges one rate.

    Args:
        words: int16 words of a tile.
        codebook: The trellis's codebook.
        tiles: How many tiles the error is measured on.
        repeats: How often `TIMED` of them are timed.
    """
    generator = torch.Generator().manual_seed(words)
    weights = torch.randn(tiles, 256, generator=generator) * INNER_RMS
    scale = gaussian_scale(words, codebook)
    _, values = ops.encode_tiles(weights * scale, words, codebook)
    error = (values / scale - weights).square().mean() / weights.square().mean()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        ops.encode_tiles(weights[:TIMED] * scale, words, codebook)
        best = min(best, time.process_time() - start)
    return {
        "bits": words / 16,
        "codebook": codebook.label,
        "tiles_per_second": TIMED / best,
        "weights_per_second": 256 * TIMED / best,
        "scale": scale,
        "nmse": error.item(),
    }


def main() -> None:
    """Prints the table, and writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", type=int, default=64, help="tiles for the error")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of a rate")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    if options.tiles < TIMED or options.repeats < 1:
        parser.error(f"--tiles must be {TIMED} or more, and --repeats 1 or more")

    torch.set_num_threads(1)
    isa = os.environ.get("EXL3_CPU_ISA", "the best of this machine")
    load = os.getloadavg()[0]
    print(f"one thread, instructions: {isa}, load average {load:.1f}\n")
    print(f"{'bits':>4} {'codebook':>9} {'tiles/s':>8} {'Mweights/s':>11} {'nmse':>10}")
    rows = []
    for words in WORDS:
        for codebook in Codebook:
            if not is_legal_rate(words, codebook):
                continue
            row = measure(words, codebook, options.tiles, options.repeats)
            rows.append(row)
            print(
                f"{row['bits']:4g} {row['codebook']:>9} "
                f"{row['tiles_per_second']:8.0f} "
                f"{row['weights_per_second'] / 1e6:11.3f} {row['nmse']:10.3g}",
                flush=True,
            )
    if options.json:
        report = {"isa": isa, "threads": 1, "load_average": load, "rates": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
