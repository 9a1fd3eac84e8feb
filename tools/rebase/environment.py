# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Where a rehearsal imports and tests: an environment of its own, or today's.

Where the release has a wheel for the CPU, the worktree gets an environment by `make`,
like any checkout. Where the official wheel stands in, that would fetch gigabytes of
CUDA libraries to run none of them. Then today's environment serves, with the new tree
first on the path, and what the release newly requires beside it. Its torch stays.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.fork.errors import ForkError

IMPORTS = Path(__file__).with_name("import_all.py")
#: What `make test` says to pytest.
_TEST_WORDS = ["-n", "2", "--dist", "loadgroup", "-m", "not slow"]


@dataclass(frozen=True)
class Environment:
    """How to run the new tree.

    Attributes:
        python: The interpreter.
        tests: The command that tests, to which pytest's words are added.
        variables: Environment variables that differ.
        unmet: What the release requires and this environment has not.
    """

    python: Path
    tests: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    unmet: list[str] = field(default_factory=list)

    def run(self, command: list[str], **how) -> subprocess.CompletedProcess[str]:
        """Runs a command there."""
        variables = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", **self.variables}
        return subprocess.run(command, env=variables, text=True, **how)


def own_environment(tree: Path) -> Environment:
    """Builds the worktree as `make install` does.

    Raises:
        ForkError: It does not build; the reason stands above.
    """
    python = tree / ".venv" / "bin" / "python"
    environment = Environment(python, ["make", "-C", str(tree), "test"])
    built = environment.run(["make", "-C", str(tree), "install"])
    if built.returncode:
        raise ForkError(f"make install failed in {tree}; see above")
    return environment


def todays_environment(
    repo: Path, tree: Path, composed: Path, fork_version: str, requirements: list[str]
) -> Environment:
    """Puts the composed tree before what is installed here.

    Args:
        repo: The repository, whose compiled ops serve: they keep to a stable ABI.
        tree: The worktree.
        composed: The composed tree.
        fork_version: What the new fork calls itself.
        requirements: What it requires, less what only CUDA needs.

    Raises:
        ForkError: A requirement cannot be had.
    """
    extra = composed.parent / "requirements"
    lacking = unmet(requirements)
    fetched = [line for line in lacking if Requirement(line).name != "torch"]
    if fetched:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--upgrade", "--target", str(extra), *fetched]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            said = result.stderr.strip().splitlines() or ["pip said nothing"]
            raise ForkError(f"cannot fetch {', '.join(fetched)} ({said[-1]})")
    info = extra / f"vllm-{fork_version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.4", "Name: vllm", f"Version: {fork_version}"]
    absent = [line for line in lacking if line not in fetched]
    # What is absent is said in the report; every test need not find it anew.
    lines += [f"Requires-Dist: {line}" for line in requirements if line not in absent]
    (info / "METADATA").write_text("\n".join([*lines, ""]))
    for library in (repo / "exl3").glob("*.so"):
        shutil.copy(library, tree / "exl3")
        (composed / "exl3" / library.name).symlink_to(tree / "exl3" / library.name)
    path = os.pathsep.join([str(composed), str(extra)])
    return Environment(
        Path(sys.executable),
        [sys.executable, "-m", "pytest", *_TEST_WORDS],
        {"PYTHONPATH": path},
        unmet=absent,
    )


def unmet(requirements: list[str]) -> list[str]:
    """Those that what is installed here does not meet."""
    lines = []
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            installed = version(canonicalize_name(requirement.name))
        except PackageNotFoundError:
            lines.append(line)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            lines.append(line)
    return lines


def failed_imports(
    environment: Environment, modules: list[str], folder: Path
) -> dict[str, str]:
    """Modules that do not import there, each with its reason."""
    result = environment.run(
        [str(environment.python), str(IMPORTS)],
        input="\n".join(modules),
        stdout=subprocess.PIPE,
        cwd=folder,
    )
    lines = result.stdout.strip().splitlines()
    if result.returncode or not lines:
        return {"python": f"ended with exit code {result.returncode}"}
    return json.loads(lines[-1])
