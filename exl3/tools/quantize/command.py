# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 quantize`: encodes a BF16 checkpoint as EXL3.

Plain, every linear layer and every routed expert; or rank-sliced, the routed experts in
one slice for each rank. One layer is in memory at a time, all cores encode, and a run
that was stopped goes on with --resume. The same arguments give the same bytes, whatever
the number of threads.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from exl3.checkpoint.layers import LayerPlan, count_field
from exl3.checkpoint.plan import read_config, read_with_modules, text_config
from exl3.format.constants import CODEBOOKS
from exl3.format.errors import UnsupportedFormatError
from exl3.tools.quantize.bits import expert_bits
from exl3.tools.quantize.plan import plan_parts
from exl3.tools.quantize.recipe import Recipe, read_bits_map
from exl3.tools.shared.arguments import count, number
from exl3.tools.shared.errors import ToolError

#: Tokens of a window of text.
WINDOW = 512
#: Fewer tokens say nothing of a model, and draft layers need some.
_LEAST_TOKENS = 16


def add_command(commands: Any) -> None:
    """Adds `quantize` to the commands of `exl3`."""
    parser = commands.add_parser(
        "quantize",
        help="encode a BF16 checkpoint as EXL3",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="BF16 checkpoint")
    parser.add_argument("target", type=Path, metavar="DST", help="folder to make")
    bits = parser.add_argument_group(
        "bits per weight", "1 to 8, with mul1 also 1.5, 2.5 and 3.5; 16: as it is"
    )
    bits.add_argument(
        "--bits",
        type=_bits,
        metavar="B",
        help="of routed experts, and of what is not named below; if it is no whole "
        "number, their mean: experts whose errors matter more get a bit more",
    )
    bits.add_argument(
        "--bits-map",
        metavar="FILE",
        help='of each routed expert instead, as JSON: {"3": {"k": [3, 4, 3]}} by layer',
    )
    bits.add_argument(
        "--attn-bits",
        type=_bits,
        metavar="B",
        help="of attention, dense layers and shared experts (default: --bits, rounded "
        "up; 16 with --rank-sliced)",
    )
    bits.add_argument(
        "--head-bits",
        type=_bits,
        metavar="B",
        help="of lm_head (default: 6; 16 with --rank-sliced)",
    )
    bits.add_argument(
        "--mtp-bits",
        type=_bits,
        metavar="B",
        help="of the MTP layers' routed experts (default: --bits, rounded down); 16 "
        "leaves these layers as they are",
    )
    bits.add_argument(
        "--dense",
        action="append",
        default=[],
        metavar="PATTERN",
        help="modules that stay as they are, such as '*.kv_b_proj'; may be repeated",
    )
    form = parser.add_argument_group("format")
    form.add_argument(
        "--rank-sliced",
        action="store_true",
        help="a slice of each expert for each rank",
    )
    form.add_argument("--tp", type=count(), metavar="P", help="ranks to slice for")
    form.add_argument(
        "--codebook",
        choices=sorted(CODEBOOKS),
        help="of the trellises (default: mul1; rank-sliced experts have mcg)",
    )
    text = parser.add_argument_group("calibration")
    text.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text like what the model is used for, by which errors are weighed "
        "(default: none, all weights count alike)",
    )
    text.add_argument(
        "--tokens",
        type=count(_LEAST_TOKENS),
        default=65536,
        metavar="N",
        help="tokens of it to read at most (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random signs"
    )
    parser.add_argument(
        "--threads",
        type=count(),
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="cores to use (default: all)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="finish what a stopped run left"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Encodes a checkpoint.

    Raises:
        CheckpointError: The source cannot be encoded.
        ToolError: An argument or the output cannot be used.
    """
    started = time.monotonic()
    recipe = recipe_of(options)
    config = read_config(options.source)
    checkpoint, modules = read_with_modules(options.source, config)
    text = text_config(config)
    stamp = config.get("quantization_config") or text.get("quantization_config")
    if checkpoint.plan.is_exl3 or stamp:
        method = stamp.get("quant_method") if isinstance(stamp, Mapping) else "exl3"
        raise UnsupportedFormatError(
            f"{options.source}: is quantized already ({str(method)[:40]}); encode the "
            "BF16 checkpoint that it was made from"
        )
    num_layers = LayerPlan.from_config(text).num_layers
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings")))
    parts = plan_parts(modules, num_layers, recipe, tied=tied)
    # What is wrong with the arguments is told before anything is loaded.
    if not recipe.is_mixed or options.text is None:
        expert_bits(parts, num_layers, recipe)

    from exl3.tools.quantize.write import write_pack  # imports torch

    report = write_pack(
        options.source,
        options.target,
        config=config,
        parts=parts,
        num_layers=num_layers,
        recipe=recipe,
        text_file=options.text,
        window=min(
            WINDOW,
            options.tokens,
            count_field(text, "max_position_embeddings", WINDOW),
            count_field(text, "index_topk", WINDOW),
        ),
        tokens=options.tokens,
        seed=options.seed,
        threads=options.threads,
        request=_request(options, recipe),
        resume=options.resume,
    )
    report["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(report, indent=2) if options.json else "\n".join(_lines(report)))


def recipe_of(options: argparse.Namespace) -> Recipe:
    """What the arguments ask for.

    Raises:
        ToolError: They exclude each other.
    """
    if options.rank_sliced != (options.tp is not None):
        raise ToolError(
            "--rank-sliced, --tp: belong together; give both, or neither for a plain "
            "pack"
        )
    bits_map = None if options.bits_map is None else read_bits_map(options.bits_map)
    return Recipe.make(
        bits=options.bits,
        bits_map=bits_map,
        attn_bits=options.attn_bits,
        head_bits=options.head_bits,
        mtp_bits=options.mtp_bits,
        codebook=CODEBOOKS.get(options.codebook),
        ranks=options.tp,
        dense=tuple(options.dense),
    )


def _request(options: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """What decides the bytes that are written."""
    request: dict[str, Any] = {"command": "quantize", **vars(recipe)}
    request |= {"codebook": recipe.codebook.label, "seed": options.seed}
    request |= {"text": None, "tokens": options.tokens}
    if options.text is not None:
        request["text"] = hashlib.sha256(options.text.read_bytes()).hexdigest()
    return request


def _lines(report: Mapping[str, Any]) -> Iterable[str]:
    table = [("weights", "matrices", "bits", "relative error")]
    for kind, of in report["weights"].items():
        error = f"{of['relative_error']:.2g}"
        table.append((kind, str(of["matrices"]), f"{of['bits']:.4g}", error))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        yield "  ".join(padded).rstrip()
    yield ""
    yield (
        f"{report['folder']}: {report['bytes'] / 1e6:.1f} MB of weights, where the "
        f"source has {report['source_bytes'] / 1e6:.1f} MB; {report['seconds']:.0f} s"
    )


def _bits(text: str) -> int | float:
    value = number("bitrate", 1, 16)(text)
    return int(value) if value == int(value) else value
