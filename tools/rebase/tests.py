# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs the fork's tests on the new tree, and reads what they gave."""

import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from tools.rebase.environment import Environment

#: Folders of tests that start engines, which need upstream's compiled code.
_ENGINES = ("tests/serving", "tests/pipeline", "tests/robustness")
#: How an error names upstream's compiled CPU code where a stand-in has none.
_COMPILED_CODE = ("'_OpNamespace' '_C", "No module named 'vllm._C")


@dataclass
class Tests:
    """What the tests gave.

    Attributes:
        passed: How many passed.
        skipped: How many skipped themselves, or are expected to fail.
        failed: Reason of each test that failed, by its name.
        compiled: Those that failed for want of upstream's compiled CPU code.
    """

    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    compiled: dict[str, str] = field(default_factory=dict)


def run_tests(
    environment: Environment, tree: Path, words: str, stands_in: bool
) -> Tests:
    """Runs pytest in the worktree.

    Args:
        environment: Where to run.
        tree: The worktree.
        words: More words for pytest, as a shell would take them.
        stands_in: Whether upstream's compiled CPU code is absent.
    """
    results = tree.parent / "tests.xml"
    results.unlink(missing_ok=True)
    more = [f"--junitxml={results}", *shlex.split(words)]
    if stands_in:
        more += [f"--ignore={folder}" for folder in _ENGINES]
    command = [*environment.tests, *more]
    if command[0] == "make":
        command = [*environment.tests, f"ARGS={shlex.join(more)}"]
    environment.run(command, cwd=tree, stdout=sys.stderr, stderr=subprocess.STDOUT)
    if not results.is_file():
        return Tests(failed={"pytest": "ended before it wrote its results"})
    return read_results(results, stands_in)


def read_results(results: Path, stands_in: bool) -> Tests:
    """Reads pytest's JUnit file."""
    tests = Tests()
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name')}"
        problem = case.find("failure")
        if problem is None:
            problem = case.find("error")
        if problem is not None:
            text = f"{problem.get('message')}\n{problem.text}"
            absent = stands_in and any(words in text for words in _COMPILED_CODE)
            lines = (problem.get("message") or "").strip().splitlines() or ["?"]
            (tests.compiled if absent else tests.failed)[name] = lines[0]
        elif case.find("skipped") is not None:
            tests.skipped += 1
        else:
            tests.passed += 1
    if not tests.passed and not tests.failed and not tests.compiled:
        tests.failed["pytest"] = "no test was run"
    return tests
