# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 prune`: removes routed experts, and keeps more of them where they do more.

A text is run through the checkpoint, one layer in memory at a time. What each expert
adds to it decides which experts stay, so that layers end up with different numbers of
them. The result is a checkpoint that serves as it is.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from exl3.tools.prune.budget import parse_size
from exl3.tools.prune.layers import Source, read_source
from exl3.tools.prune.plan import Choice, Plan
from exl3.tools.prune.record import as_record
from exl3.tools.prune.statistics import SALIENCIES
from exl3.tools.shared.arguments import count, number


def add_command(commands: Any) -> None:
    """Adds `prune` to the commands of `exl3`."""
    parser = commands.add_parser(
        "prune",
        help="remove routed experts, by what a text says of them",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="checkpoint to prune")
    parser.add_argument("target", type=Path, metavar="DST", help="folder to make")
    budget = parser.add_argument_group(
        "budget", "what stays; one of these"
    ).add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--keep-ratio",
        type=number("share", 0, 1),
        metavar="R",
        help="this share of the decoder layers' experts, such as 0.75",
    )
    budget.add_argument(
        "--target-size",
        type=_size,
        metavar="SIZE",
        help="as many as make all tensors take this: 1.5GB, 800MB, 12GiB",
    )
    budget.add_argument(
        "--widths",
        type=_widths,
        metavar="LIST",
        help="a width for each decoder layer with experts, such as 8,7,5; or one for "
        "all",
    )
    budget.add_argument(
        "--profile",
        type=Path,
        metavar="JSON",
        help="the experts that it names, such as pruned_experts.json of another run; "
        "needs no text",
    )
    parser.add_argument(
        "--floor",
        type=count(),
        metavar="N",
        help="least width of a layer (default: half of the mean that the budget "
        "leaves, and what its router needs)",
    )
    draft = parser.add_argument_group(
        "MTP layers", "without either, they keep all of their experts"
    ).add_mutually_exclusive_group()
    draft.add_argument(
        "--mtp-keep-ratio",
        type=number("share", 0, 1),
        metavar="R",
        help="this share of their experts",
    )
    draft.add_argument(
        "--mtp-widths",
        type=_widths,
        metavar="LIST",
        help="a width for each, or one for all",
    )
    text = parser.add_argument_group("statistics")
    text.add_argument(
        "--saliency",
        choices=SALIENCIES,
        default="reap",
        help="what an expert is worth: the mean size of what it adds to a token that "
        "chose it (reap, the default), or how many tokens chose it",
    )
    text.add_argument("--text", type=Path, metavar="FILE", help="text to run")
    text.add_argument(
        "--tokens",
        type=count(least=2),
        default=32768,
        metavar="N",
        help="tokens of it to read at most (default: %(default)s)",
    )
    text.add_argument(
        "--statistics",
        type=Path,
        metavar="FILE",
        help="take the statistics from here, and run no text",
    )
    text.add_argument(
        "--save-statistics", type=Path, metavar="FILE", help="write them here as JSON"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would stay, and write nothing"
    )
    parser.add_argument(
        "--resume", action="store_true", help="finish what a stopped run left"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prunes a checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be pruned.
        ToolError: An argument or the output cannot be used.
    """
    source = read_source(options.source)
    plan = Plan(options, source)
    if options.dry_run:
        choice = plan.choose(None)
    else:
        from exl3.tools.prune.write import write_pruned
        from exl3.tools.shared.staging import StagedCheckpoint

        with StagedCheckpoint(
            options.target, plan.request, options.resume, sources=[source.folder]
        ) as out:
            choice = plan.choose(out)
            record = as_record(source, choice.kept, plan.record, choice.tokens)
            write_pruned(source, choice.kept, record, out)
    report = _report(source, choice)
    print(json.dumps(report, indent=2) if options.json else "\n".join(_lines(report)))


def _report(source: Source, choice: Choice) -> dict[str, Any]:
    """What `--json` prints."""
    whole = {index: tuple(range(at.width)) for index, at in source.layers.items()}
    layers = []
    for index, layer in source.layers.items():
        kept, scores = choice.kept[index], choice.scores.get(index)
        total = sum(scores or ())
        layers.append(
            {
                "layer": index,
                "draft": layer.is_draft,
                "experts": layer.width,
                "kept": list(kept),
                "saliency_kept": (
                    sum(scores[at] for at in kept) / total if scores and total else None
                ),
            }
        )
    return {
        "layers": layers,
        "tokens": choice.tokens,
        "bytes": source.num_bytes(choice.kept),
        "source_bytes": source.num_bytes(whole),
    }


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [("layer", "experts", "kept", "of their saliency")]
    for layer in report["layers"]:
        share = layer["saliency_kept"]
        rows.append(
            (
                f"{layer['layer']} draft" if layer["draft"] else str(layer["layer"]),
                str(layer["experts"]),
                str(len(layer["kept"])),
                "-" if share is None else f"{share:.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()
    yield ""
    before = sum(layer["experts"] for layer in report["layers"])
    after = sum(len(layer["kept"]) for layer in report["layers"])
    yield (
        f"{after} of {before} routed experts, {report['bytes'] / 1e6:.1f} of "
        f"{report['source_bytes'] / 1e6:.1f} MB"
    )


def _widths(text: str) -> tuple[int, ...]:
    return tuple(count()(width) for width in text.split(","))


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
