# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs upstream's own tests on stock and on the fork, and compares.

    python -m tools.upstream_tests                      everything; writes the page
    python -m tools.upstream_tests --select config      one group, no page
    python -m tools.upstream_tests --baseline stock.json   stock's results from before

Exit code 0: the fork passes every test that stock passes; 1: it doesn't; 2: the
comparison couldn't be made.
"""

import argparse
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tools.fork.errors import ForkError
from tools.fork.pins import REPO_ROOT, Pins, load_pins
from tools.fork.wheel import cache_folder
from tools.upstream_tests.compare import broken, check_groups_ran, table
from tools.upstream_tests.environment import make_extras, make_stock
from tools.upstream_tests.runner import Interpreter, Run, run_group
from tools.upstream_tests.sdist import fetch_sdist, unpack_tests
from tools.upstream_tests.selection import Group, choose, load_selection

WORK_DIR = REPO_ROOT / "build" / "upstream-tests"
PAGE = REPO_ROOT / "docs" / "testing" / "upstream.md"


def run_all(
    name: str, interpreter: Interpreter, groups: Sequence[Group], limit_seconds: float
) -> Run:
    """Runs the groups on one interpreter, and keeps the results in its folder.

    Args:
        name: ``stock`` or ``fork``.
        interpreter: Where to run.
        groups: What to run.
        limit_seconds: Limit of one test, in seconds.
    """
    shutil.rmtree(interpreter.work_dir, ignore_errors=True)
    run = Run()
    for group in groups:
        start = time.monotonic()
        results = run_group(
            interpreter, group.name, group.arguments(), limit_seconds, run
        )
        seconds = time.monotonic() - start
        run.seconds += seconds
        counts = Counter(result.outcome for result in results.values())
        said = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        print(f"{name} {group.name}: {said} in {seconds:.0f} s", flush=True)
        run.save(interpreter.work_dir / "results.json")
    return run


def check_version(name: str, run: Run, expected: str) -> None:
    """The interpreter must hold what it is taken for, or stock meets stock.

    Raises:
        ForkError: Its vLLM is another one.
    """
    if run.vllm != expected:
        raise ForkError(
            f"{name}: the tests ran on vLLM {run.vllm or '(none)'} in "
            f"{run.path or '(nowhere)'}, expected {expected}"
        )


def compare(args: argparse.Namespace, pins: Pins) -> int:
    """Makes the environments, runs both sides and reports."""
    selection = load_selection()
    groups = choose(selection, args.select)
    sdist = fetch_sdist(pins.version, selection.sdist_sha256, cache_folder())
    tests_root = WORK_DIR / "source"
    unpack_tests(sdist, tests_root)
    extras = make_extras(WORK_DIR / "extras")

    def run(name: str, python: Path) -> Run:
        interpreter = Interpreter(python, extras, tests_root, WORK_DIR / name)
        return run_all(name, interpreter, groups, selection.limit_seconds)

    if args.baseline:
        stock = Run.load(args.baseline)
    else:
        stock = run("stock", args.stock_python or make_stock(WORK_DIR / "venv", pins))
    check_version("stock", stock, pins.version)
    check_groups_ran(stock, groups)
    fork = run("fork", args.python)
    check_version("fork", fork, pins.fork_version("cpu"))

    if not args.select:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(table(stock, fork, selection), encoding="utf-8")
    ran = {file.path for group in groups for file in group.files}
    worse = {
        node_id: result
        for node_id, result in broken(stock, fork).items()
        if node_id.split("::")[0] in ran
    }
    for node_id, result in worse.items():
        print(
            f"stock passes, the fork doesn't: {node_id}: {result.outcome}: "
            f"{result.reason}"
        )
    print(
        f"{len(worse)} tests that stock passes and the fork doesn't; logs: {WORK_DIR}"
    )
    return 1 if worse else 0


def main() -> int:
    """Parses the arguments, and turns what can't be done into one line."""
    parser = argparse.ArgumentParser(prog="python -m tools.upstream_tests")
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        help="the fork's interpreter; default: this one",
    )
    parser.add_argument(
        "--stock-python",
        type=Path,
        help="an interpreter with the stock release; default: one is made",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        help="results.json of stock from an earlier run, instead of running it",
    )
    parser.add_argument(
        "--select",
        action="append",
        default=[],
        metavar="GROUP",
        help="run this group only; may be given again",
    )
    args = parser.parse_args()
    # So that the process under test ends with this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return compare(args, load_pins())
    except ForkError as error:
        print(f"upstream-tests: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
