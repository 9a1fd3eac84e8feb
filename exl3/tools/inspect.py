# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 inspect`: shows how a checkpoint is stored, or why it is refused.

What it accepts, the server loads: both ask the same reader.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exl3.checkpoint.agreement import decoder_layers
from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.experts import ExpertLayer
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.plan import (
    CheckpointPlan,
    read_config,
    read_with_modules,
    text_config,
)
from exl3.checkpoint.ranks import (
    check_tensor_parallel,
    inner_cuts,
    legal_sizes,
    problem_with,
)
from exl3.format.names import layer_of, parse_name

#: Sizes of tensor parallelism that people have machines for.
_COMMON_SIZES = (2, 4, 8, 16)


@dataclass
class Row:
    """One layer, or what belongs to no layer."""

    layer: int | None
    draft: bool = False
    width: int = 0  # routed experts
    experts: Counter[str] = field(default_factory=Counter)  # by bits, or "BF16"
    linears: Counter[str] = field(default_factory=Counter)  # by bits; EXL3 ones
    codebooks: set[str] = field(default_factory=set)
    storage: str = ""  # of the experts
    exl3_bytes: int = 0
    dense_bytes: int = 0


def add_command(commands: Any) -> None:
    """Adds `inspect` to the commands of `exl3`."""
    parser = commands.add_parser(
        "inspect", help="show how a checkpoint is stored", description=__doc__
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--tp", type=_size, metavar="N", help="refuse it if N ranks cannot share it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the plan of a checkpoint.

    Raises:
        CheckpointError: It cannot be served.
    """
    config = read_config(options.folder)
    checkpoint, modules = read_with_modules(options.folder, config)
    widths = resolve_widths(text_config(config), checkpoint.widths)
    if options.tp is not None:
        check_tensor_parallel(checkpoint.plan, config, options.tp)
    sizes = sorted({*_COMMON_SIZES, options.tp or 2})
    report = summarize(checkpoint.plan, modules, config, widths, sizes)
    print(json.dumps(report, indent=2) if options.json else "\n".join(_lines(report)))
    return 0


def summarize(
    plan: CheckpointPlan,
    modules: Mapping[str, Mapping[str, TensorHeader]],
    config: Mapping[str, Any],
    widths: Iterable[int] | None,
    sizes: Sequence[int] = _COMMON_SIZES,
) -> dict[str, Any]:
    """Everything that `exl3 inspect --json` prints.

    Args:
        plan: The checkpoint's plan.
        modules: All its tensors, by module.
        config: Its `config.json`.
        widths: Routed experts of each layer, if layers differ.
        sizes: Numbers of ranks to say of why they do not fit, or what they cut.
    """
    rows = _rows(plan, modules, decoder_layers(text_config(config)))
    drafts = [row for row in rows if row.draft]
    draft = "exl3" if any(row.exl3_bytes for row in drafts) else "dense"
    return {
        "is_exl3": plan.is_exl3,
        "layers": [_plain(row) for row in rows],
        "expert_widths": None if widths is None else list(widths),
        "draft": draft if drafts else None,
        "tensors": sum(map(len, modules.values())),
        "exl3_bytes": sum(row.exl3_bytes for row in rows),
        "dense_bytes": sum(row.dense_bytes for row in rows),
        "tensor_parallel": legal_sizes(plan, config),
        "not_tensor_parallel": {
            size: problem
            for size in sizes
            if (problem := problem_with(plan, config, size)) is not None
        },
        "cut_inside_blocks": {
            size: [cut._asdict() for cut in cuts]
            for size in sizes
            if (cuts := inner_cuts(plan, config, size))
            and problem_with(plan, config, size) is None
        },
        "warnings": list(plan.warnings),
    }


def _rows(
    plan: CheckpointPlan,
    modules: Mapping[str, Mapping[str, TensorHeader]],
    num_layers: int,
) -> list[Row]:
    rows: dict[int | None, Row] = {}

    def row_of(module: str) -> Row:
        layer = layer_of(module, num_layers)
        row = rows.setdefault(layer, Row(layer))
        row.draft = layer is not None and layer >= num_layers
        return row

    dense: dict[str, dict[int, str]] = {}  # dtype of each expert, by layer
    for module, fields in modules.items():
        row = row_of(module)
        size = sum(header.num_bytes for header in fields.values())
        match = parse_name(f"{module}.weight")
        experts = match["experts"] if match else None
        if module in plan.linears or experts in plan.experts:
            row.exl3_bytes += size
        else:
            row.dense_bytes += size
            if match and experts and "weight" in fields:
                of = dense.setdefault(experts, {})
                of[int(match["expert"])] = fields["weight"].dtype
    for name, of in dense.items():
        row = row_of(name)
        row.width, row.storage = len(of), "whole"
        row.experts.update(of.values())
    for module, matrix in plan.linears.items():
        row = row_of(module)
        row.linears[str(matrix.bits)] += 1
        row.codebooks.add(matrix.codebook.label)
    for name, layer in plan.experts.items():
        _add_experts(row_of(name), layer)
    last = num_layers * 2  # what belongs to no layer comes last
    return sorted(
        rows.values(), key=lambda row: last if row.layer is None else row.layer
    )


def _add_experts(row: Row, layer: ExpertLayer) -> None:
    row.width = layer.width
    for codes in layer.encodings:
        bits = [str(code.bits) for code in codes]
        row.experts[bits[0] if len(set(bits)) == 1 else "/".join(bits)] += 1
        row.codebooks.update(code.codebook.label for code in codes)
    row.storage = f"{layer.ranks} slices" if layer.sliced else "whole"
    if layer.shared_h:
        row.storage += ", shared_h"


def _plain(row: Row) -> dict[str, Any]:
    fields = dict(vars(row))
    for name in ("experts", "linears"):
        fields[name] = dict(sorted(fields[name].items()))
    fields["codebooks"] = sorted(fields["codebooks"])
    return fields


def _lines(report: Mapping[str, Any]) -> Iterable[str]:
    table = [
        ("layer", "experts", "expert bits", "linear bits", "codebook", "stored", "MB")
    ]
    for row in report["layers"]:
        label = "other" if row["layer"] is None else str(row["layer"])
        table.append(
            (
                f"{label} draft" if row["draft"] else label,
                str(row["width"] or "-"),
                _tiers(row["experts"]),
                _tiers(row["linears"]),
                ",".join(row["codebooks"]) or "-",
                row["storage"] or "-",
                f"{(row['exl3_bytes'] + row['dense_bytes']) / 1e6:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        yield "  ".join(padded).rstrip()
    yield ""
    yield (
        f"{report['tensors']} tensors, {report['exl3_bytes'] / 1e6:.1f} MB EXL3 and "
        f"{report['dense_bytes'] / 1e6:.1f} MB dense"
    )
    yield f"draft (MTP): {report['draft'] or 'none'}"
    yield f"tensor parallel: {', '.join(map(str, report['tensor_parallel']))}"
    for size, problem in report["not_tensor_parallel"].items():
        yield f"  not {size}: {problem}"
    for size, cuts in report["cut_inside_blocks"].items():
        first = cuts[0]
        yield (
            f"  {size} cuts {len(cuts)} linear layers inside blocks of 128, which two "
            f"ranks then compute (first {first['module']}: {first['features']} "
            f"{first['dimension']}; between blocks at {first['legal']})"
        )
    for warning in report["warnings"]:
        yield f"warning: {warning}"


def _tiers(counts: Mapping[str, int]) -> str:
    """How many have which bits: K3 x2, K4 x6; or which type."""
    labels = {bits: bits if bits[0].isalpha() else f"K{bits}" for bits in counts}
    return (
        ", ".join(f"{labels[bits]} x{count}" for bits, count in counts.items()) or "-"
    )


def _size(text: str) -> int:
    size = int(text)
    if size < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return size
