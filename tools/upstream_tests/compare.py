# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Compares two runs of upstream's tests, and writes the table of them."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tools.fork.errors import ForkError
from tools.upstream_tests.runner import Result, Run
from tools.upstream_tests.selection import Group, Selection, UpstreamFile

_GOOD = ("passed", "xfailed", "xpassed")
_ABSENT = Result("not collected", "the test isn't there")

_GPU = (
    r"(?i)cuda|rocm|aiter|xpu|gpu|nvidia|sm\d|blackwell|fp8 is not supported"
    "|unsupported platform|capability"
)
# Why a test doesn't run on a CPU without a hub: the first pattern that fits its reason.
# What fits none is quoted.
_CAUSES = (
    (r"No module named '(torchvision|torchaudio|torchcodec)", "needs \\1"),
    (r"No module named '([\w.]+)'", "needs the package \\1"),
    (r"(?i)hugging ?face|hub|connect|resolve|snapshot", "needs a model hub"),
    (_GPU, "needs a GPU"),
    (r"[Tt]riton", "needs Triton"),
    (r"transformers", "needs another release of transformers"),
)

_INTRODUCTION = """\
# Upstream's own tests

`make upstream-tests` writes this page. It fetches upstream's source distribution, runs
those of its tests that cover what the fork extends, once on the stock release and once
on the fork, and compares test by test. The fork must pass every test that stock passes.
`tools/upstream_tests/selection.toml` lists what is run, and why.

Both run on a CPU, without a model hub, on the same requirements. A test that needs more
passes on neither; the last column says what it needs.
"""


def is_good(result: Result) -> bool:
    """Whether the test says that the code under it is right."""
    return result.outcome in _GOOD


def broken(stock: Run, fork: Run) -> dict[str, Result]:
    """The tests that stock passes and the fork doesn't, with what the fork gives.

    A test that the fork skips or no longer has counts too.
    """
    return {
        node_id: fork.results.get(node_id, _ABSENT)
        for node_id, result in stock.results.items()
        if is_good(result) and not is_good(fork.results.get(node_id, _ABSENT))
    }


def check_groups_ran(stock: Run, groups: Sequence[Group]) -> None:
    """A group that passes nothing on stock compares nothing.

    Raises:
        ForkError: There is such a group.
    """
    for group in groups:
        if not any(
            is_good(result)
            for file in group.files
            for result in _of_file(stock, file).values()
        ):
            raise ForkError(
                f"group {group.name}: no test passes on stock, so there is nothing to "
                "compare; see the group's log"
            )


def table(stock: Run, fork: Run, selection: Selection) -> str:
    """The page docs/testing/upstream.md."""
    lines = [
        *_INTRODUCTION.splitlines(),
        "",
        "| | version | Python | tests | passed | seconds |",
        "|---|---|---|---|---|---|",
        _summary("stock", stock),
        _summary("fork", fork),
        "",
    ]
    worse = broken(stock, fork)
    lines.append(f"Passed by stock and not by the fork: **{len(worse)}**.")
    lines += [f"- `{node_id}`: {result.outcome}" for node_id, result in worse.items()]
    for group in selection.groups:
        lines += ["", f"## {group.covers}", ""]
        lines.append("| file | tests | stock passes | fork passes | neither, and why |")
        lines.append("|---|---|---|---|---|")
        lines += [_row(stock, fork, file) for file in group.files]
    lines += ["", "## Left out", "", "| file | why |", "|---|---|"]
    lines += [f"| {_short(path)} | {why} |" for path, why in selection.left_out.items()]
    return "\n".join(lines) + "\n"


def _summary(name: str, run: Run) -> str:
    passed = sum(map(is_good, run.results.values()))
    return (
        f"| {name} | {run.vllm} | {run.python} | {len(run.results)} | {passed} "
        f"| {run.seconds:.0f} |"
    )


def _row(stock: Run, fork: Run, file: UpstreamFile) -> str:
    before, after = _of_file(stock, file), _of_file(fork, file)
    neither = [
        result
        for node_id, result in before.items()
        if not is_good(result) and not is_good(after.get(node_id, _ABSENT))
    ]
    counts = [
        len(before | after),
        sum(map(is_good, before.values())),
        sum(map(is_good, after.values())),
    ]
    name = _short(file.path)
    return f"| {name} | {' | '.join(map(str, counts))} | {_causes(neither)} |"


def _of_file(run: Run, file: UpstreamFile) -> dict[str, Result]:
    return {
        node_id: result
        for node_id, result in run.results.items()
        if node_id == file.path or node_id.startswith(f"{file.path}::")
    }


def _causes(results: Iterable[Result]) -> str:
    """Such as `12 need a GPU`, the most frequent cause first."""
    causes = Counter(cause(result) for result in results)
    return "; ".join(f"{count}: {text}" for text, count in causes.most_common())


def cause(result: Result) -> str:
    """Why a test doesn't run here, in a few words for a table."""
    for pattern, words in _CAUSES:
        found = re.search(pattern, result.reason)
        if found:
            return found.expand(words)
    reason = result.reason.removeprefix("Skipped: ").replace("|", "\\|")
    short = reason if len(reason) <= 90 else reason[:87] + "..."
    return f"{result.outcome}, {short}" if short else result.outcome


def _short(path: str) -> str:
    return f"`{path.removeprefix('tests/')}`"
