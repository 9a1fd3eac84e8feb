# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The checkout that a rehearsal works in: the repository itself stays as it is."""

import shutil
import subprocess
from pathlib import Path

from tools.fork.errors import ForkError


def git(repo: Path, *words: str) -> str:
    """What git prints.

    Raises:
        ForkError: git refuses; the message is its last line.
    """
    try:
        result = subprocess.run(
            ["git", "-C", str(repo), *words], capture_output=True, text=True
        )
    except OSError as error:
        raise ForkError(f"cannot run git: {error.strerror}") from error
    if result.returncode:
        said = result.stderr.strip().splitlines() or ["it said nothing"]
        raise ForkError(f"git {words[0]}: {said[-1]}")
    return result.stdout


def make_worktree(repo: Path, tree: Path) -> str:
    """Checks out what is committed into `tree`, and returns the commit.

    The folder around it is emptied of what an earlier rehearsal left.
    """
    commit = git(repo, "rev-parse", "--short", "HEAD").strip()
    if tree.parent.exists():
        shutil.rmtree(tree.parent)
    tree.parent.mkdir(parents=True)
    git(repo, "worktree", "prune")
    git(repo, "worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
    return commit


def uncommitted(repo: Path, *paths: str) -> list[str]:
    """Tracked files that differ from the last commit, of all or of those named."""
    return git(repo, "diff", "--name-only", "HEAD", "--", *paths).splitlines()


def naming(tree: Path, version: str) -> dict[str, int]:
    """How many lines of each tracked file name a release."""
    try:
        said = git(tree, "grep", "--count", "-I", "-F", version)
    except ForkError:  # git grep exits with 1 where nothing is found
        return {}
    counts = (line.rpartition(":") for line in said.splitlines())
    return {path: int(count) for path, _, count in counts}
