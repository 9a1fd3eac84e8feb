# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Results as text: the table of one, and two side by side."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.serving.points import Point
from benchmarks.serving.results import Result, Series
from benchmarks.serving.server import BenchmarkError

_NONE = "-"

_COLUMNS: dict[str, Callable[[Point], str]] = {
    "streams": lambda point: str(point.streams),
    "prompt": lambda point: str(point.prompt_tokens),
    "decode tok/s": lambda point: _number(point.decode),
    "each": lambda point: _number(point.decode_each),
    "prefill tok/s": lambda point: _number(point.prefill),
    "TTFT ms": lambda point: _number(point.first_token_ms),
    "p99": lambda point: _number(point.first_token_p99_ms),
    "accepted": lambda point: (
        _NONE if point.acceptance is None else f"{point.acceptance:.1%}"
    ),
    "length": lambda point: (
        _NONE if point.accepted_length is None else f"{point.accepted_length:.2f}"
    ),
}

#: What two results are compared by.
_COMPARED: dict[str, Callable[[Point], float | None]] = {
    "decode tok/s": lambda point: point.decode,
    "prefill tok/s": lambda point: point.prefill,
    "TTFT ms": lambda point: point.first_token_ms,
    "length": lambda point: point.accepted_length,
}


def table(result: Result) -> str:
    """The table of a result, in Markdown."""
    lines = [
        f"{result.model} on {result.machine}, vLLM {result.version}, {result.date}"
    ]
    for series in result.series:
        lines += ["", _heading(series), ""]
        rows = [[cell(point) for cell in _COLUMNS.values()] for point in series.points]
        lines += _aligned([list(_COLUMNS), *rows])
        lines += [f"left out: {reason}" for reason in series.left_out]
    return "\n".join(lines)


def _heading(series: Series) -> str:
    tokens = series.kv_cache_tokens
    cache = "unknown" if tokens is None else f"{tokens:,} tokens"
    outputs = sorted({point.output_tokens for point in series.points})
    answers = " or ".join(str(output) for output in outputs) or "no"
    return f"{series.name}: answers of {answers} tokens, KV cache {cache}"


def comparison(files: Sequence[Path], results: Sequence[Result]) -> str:
    """Two results side by side, in Markdown: A, B, and B over A.

    Raises:
        BenchmarkError: They have no point in common.
    """
    names = "AB"
    lines = [
        f"{name}: {file}: {result.model} on {result.machine}, vLLM {result.version}, "
        f"{result.date}"
        for name, file, result in zip(names, files, results, strict=True)
    ]
    a, b = ({series.name: series for series in result.series} for result in results)
    for name in [name for name in a if name in b]:
        rows = _rows(a[name], b[name])
        if rows:
            caches = (series.kv_cache_tokens for series in (a[name], b[name]))
            lines += ["", f"{name}: KV cache {_pair(*caches)} tokens", ""]
            lines += _aligned([["streams", "prompt", *_COMPARED], *rows])
    if len(lines) == len(names):
        raise BenchmarkError(
            f"nothing to compare: no series, streams, prompt and answer are the same "
            f"in {files[0]} ({', '.join(a)}) and {files[1]} ({', '.join(b)})"
        )
    return "\n".join(lines)


def _rows(a: Series, b: Series) -> list[list[str]]:
    """A row for each point that both have."""

    def key(point: Point) -> tuple[int, int, int]:
        return point.streams, point.prompt_tokens, point.output_tokens

    others = {key(point): point for point in b.points}
    return [
        [
            str(point.streams),
            str(point.prompt_tokens),
            *(_pair(of(point), of(others[key(point)])) for of in _COMPARED.values()),
        ]
        for point in a.points
        if key(point) in others
    ]


def _pair(a: float | None, b: float | None) -> str:
    """Two figures and what the second is of the first."""
    if a is None or b is None:
        return _NONE if a is b else f"{_number(a)} / {_number(b)}"
    ratio = f" ({b / a:.2f}x)" if a else ""
    return f"{_number(a)} / {_number(b)}{ratio}"


def _number(value: float | None) -> str:
    """Three digits at least, and no more after the point than are needed for them."""
    if value is None:
        return _NONE
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Rows as a table of Markdown, the first as its head, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| "
        + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]
