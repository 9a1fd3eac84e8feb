# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The report as text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from exl3.tools.inspect.memory import GIB

#: Kinds of experts that a line lists one by one.
_MOST_TIERS = 5


def lines(report: Mapping[str, Any], every_layer: bool = False) -> Iterator[str]:
    """The report's lines.

    Args:
        report: See `exl3.tools.inspect.report`.
        every_layer: Whether layers that are alike get a line each.
    """
    heads = ("layers", "kind", "experts", "expert bits", "linear bits", "codebook")
    table: list[tuple[str, ...]] = [(*heads, "stored", "bits/w", "size")]
    for group in _groups(report["layers"], every_layer):
        table.append(_row(group))
    yield from _aligned(table, right=(7, 8))
    yield ""
    yield from _totals(report)
    yield ""
    yield from _parallel(report)
    if report["memory"]:
        yield ""
        yield from _memory(report)
    for warning in report["warnings"]:
        yield f"warning: {warning}"


def _groups(
    layers: Iterable[Mapping[str, Any]], every_layer: bool
) -> Iterator[list[Mapping[str, Any]]]:
    """Layers that follow one another and differ only in their index."""
    group: list[Mapping[str, Any]] = []
    for layer in layers:
        if group and (every_layer or not _follows(group[-1], layer)):
            yield group
            group = []
        group.append(layer)
    if group:
        yield group


def _follows(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one["layer"] is None or other["layer"] != one["layer"] + 1:
        return False
    return {**one, "layer": 0} == {**other, "layer": 0}


def _row(group: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    layer, last = group[0], group[-1]
    label = "-" if layer["layer"] is None else str(layer["layer"])
    if len(group) > 1:
        label += f"-{last['layer']}"
    bits = layer["bits_per_weight"]
    return (
        label,
        layer["kind"],
        str(layer["width"] or "-"),
        _tiers(layer["experts"]),
        _tiers(layer["linears"]),
        ",".join(layer["codebooks"]) or "-",
        layer["storage"] or "-",
        "-" if bits is None else f"{bits:.2f}",
        _bytes(sum(it["exl3_bytes"] + it["dense_bytes"] for it in group)),
    )


def _tiers(counts: Mapping[str, int]) -> str:
    """How many have which bits: K3 x2, K4 x6; or which type."""
    rated = all(bits[0].isdigit() for bits in counts)
    if rated and len(counts) > _MOST_TIERS:  # gate, up and down may each have their own
        bits = [float(part) for tier in counts for part in tier.split("/")]
        total = sum(counts.values())
        return f"K{min(bits):g} to K{max(bits):g} in {len(counts)} kinds x{total}"
    labels = {bits: f"K{bits}" if bits[0].isdigit() else bits for bits in counts}
    return (
        ", ".join(f"{labels[bits]} x{count}" for bits, count in counts.items()) or "-"
    )


def _totals(report: Mapping[str, Any]) -> Iterator[str]:
    total = report["exl3_bytes"] + report["dense_bytes"]
    yield (
        f"{report['tensors']} tensors, {_bytes(total)}: {_bytes(report['exl3_bytes'])} "
        f"EXL3 and {_bytes(report['dense_bytes'])} dense"
    )
    if report["superseded_bytes"]:
        yield (
            f"not loaded: {_bytes(report['superseded_bytes'])} of dense weights that "
            "have an EXL3 matrix in their place"
        )
    if report["bits_per_weight"] is not None:
        yield (
            f"EXL3 matrices: {report['exl3_weights'] / 1e9:.3f} billion weights of "
            f"{report['bits_per_weight']:.3f} bits each in the mean, "
            f"{report['bits_per_weight_with_scales']:.3f} with their scales"
        )
    draft = {"exl3": "EXL3", "dense": "dense", None: "none stored"}[report["draft"]]
    yield f"draft (MTP): {draft}"
    widths = report["expert_widths"]
    if widths is not None:
        held = [width for width in widths if width]
        yield (
            f"routed experts: {sum(held)} in {len(held)} layers, "
            f"{min(held, default=0)} to {max(held, default=0)} each"
        )


def _parallel(report: Mapping[str, Any]) -> Iterator[str]:
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


def _memory(report: Mapping[str, Any]) -> Iterator[str]:
    memory = report["memory"]
    dtypes = list(memory[0]["kv_bytes"])
    tokens = [dtype for dtype in dtypes if dtype in memory[0]["kv_tokens"]]
    has_draft = report["draft"] is not None
    heads = ["GPUs", "weights/GPU", *(["MTP/GPU"] if has_draft else []), "workspace"]
    heads += [f"KV/token {dtype}" for dtype in dtypes]
    heads += [f"tokens {dtype}" for dtype in tokens]
    table = [tuple(heads)]
    for row in memory:
        weights = _bytes(row["weights"]) + ("" if row["fits"] else " (too much)")
        cells = [str(row["size"]), weights]
        cells += [_bytes(row["draft"])] if has_draft else []
        cells += [_bytes(row["workspace"])]
        cells += [_bytes(row["kv_bytes"][dtype]) for dtype in dtypes]
        cells += [_count(row["kv_tokens"][dtype]) for dtype in tokens]
        table.append(tuple(cells))
    kind = memory[0]["kv_kind"]
    yield f"memory of one GPU{f' (KV cache: {kind})' if kind else ''}:"
    yield from _aligned(table, right=range(len(heads)))
    for line in report["assumptions"]:
        yield f"  assumed: {line}"


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "none"


def _bytes(size: int) -> str:
    """A size in the unit that fits it."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


def _aligned(
    table: Sequence[Sequence[str]], right: Iterable[int] = ()
) -> Iterator[str]:
    """The table's rows, cells padded to columns; those of figures to the right."""
    to_right = set(right)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        padded = [
            cell.rjust(width) if at in to_right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        yield "  ".join(padded).rstrip()
