# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Rehearses a rebase onto another upstream release.

    python -m tools.rebase 0.33.0            in a worktree; changes nothing else
    python -m tools.rebase 0.33.0 --apply    and then moves the pins of this checkout

Writes `build/rebase/VERSION/report.md`. Exit code 0: the new tree composes, imports
and passes its tests; 1: it doesn't; 2: the rehearsal couldn't be made.
"""

import argparse
import os
import sys

from tools.fork.errors import ForkError
from tools.fork.pins import REPO_ROOT
from tools.fork.wheel import WHEEL_VARIABLE
from tools.rebase.pins import PROJECT, UPSTREAM, put_in_place
from tools.rebase.rehearse import Rehearsal, rehearse
from tools.rebase.release import release_version
from tools.rebase.report import report
from tools.rebase.worktree import uncommitted


def apply(found: Rehearsal) -> None:
    """Moves the pins of the checkout itself, where the rehearsal allows it.

    Raises:
        ForkError: A wheel is missing, the new tree does not compose, or git does not
            have the old pins.
    """
    for wheel in found.release.wheels:
        if wheel.stands_in:
            raise ForkError(f"the pins stay: {wheel.why}")
    for step, reason in found.refused.items():
        raise ForkError(f"the pins stay: {step}: {reason}")
    if changed := uncommitted(found.repo, UPSTREAM, PROJECT):
        raise ForkError(f"the pins stay: commit {' and '.join(changed)} first")
    put_in_place(found.repo, found.texts)


def main() -> int:
    """Rehearses. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="the release, such as 0.33.0")
    parser.add_argument("--apply", action="store_true", help="then move the pins")
    parser.add_argument("--tests", default="", help="more words for pytest")
    args = parser.parse_args()
    # It names the pinned release's wheel, for a build.
    os.environ.pop(WHEEL_VARIABLE, None)
    try:
        folder = REPO_ROOT / "build" / "rebase" / release_version(args.version)
        found = rehearse(REPO_ROOT, args.version, folder, args.tests)
        page = folder / "report.md"
        page.write_text(report(found) + "\n")
        print(f"wrote {page.relative_to(REPO_ROOT)}")
        if args.apply:
            apply(found)
            print(f"{UPSTREAM} and {PROJECT} pin {args.version}; see docs/rebase.md")
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if found.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
