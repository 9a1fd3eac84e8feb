# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Measured plans: how `ops.linear` cuts its work on a GPU, in place of the rule.

`python -m benchmarks.device.exl3_device --tune FILE` measures and writes them:

    {"plans": [{"architecture": "12.0", "k": 4096, "n": 4096, "rows": [1, 16],
                "block_rows": 16, "splits": 2, "unrounded": false}]}

k and n are stored sizes, n of all of a call's matrices together. A call that no plan
names is cut by the rule, and so is every call with `batch_invariant`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from exl3.format.constants import HADAMARD

#: The environment variable that names a file of plans.
VARIABLE = "EXL3_CUDA_PLANS"
BLOCK_ROWS = (16, 32, 48, 64, 128)
#: Blocks of the kernels whose weights are unrounded.
UNROUNDED_ROWS = 16
MAX_SPLITS = 8
#: Calls with more rows run in parts of so many.
MAX_ROWS = 2048


class PlanError(ValueError):
    """Plans cannot be used; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """The plan of some calls.

    Attributes:
        architecture: Compute capability, such as "12.0".
        k: In-features.
        n: Out-features.
        rows: Of x, the first and the last number that the plan is for.
        block_rows: Rows of a block.
        splits: Blocks that share k.
        unrounded: Whether the tensor core adds up the two halves of 3inst's and mcg's
            weights, or the four bytes of mul1's; the format rounds these sums to fp16.
            Calls with `exact`, or with matrices of both kinds, have rounded weights
            all the same.
    """

    architecture: str
    k: int
    n: int
    rows: tuple[int, int]
    block_rows: int
    splits: int
    unrounded: bool = False

    def __post_init__(self) -> None:
        """Refuses what no kernel does."""
        _need(
            isinstance(self.architecture, str)
            and re.fullmatch(r"\d+\.\d", self.architecture) is not None,
            f'architecture is {self.architecture!r}; write it as "12.0"',
        )
        for name in ("k", "n"):
            size = getattr(self, name)
            _need(
                _is_int(size) and size > 0 and size % HADAMARD == 0,
                f"{name} is {size!r}; stored sizes are multiples of {HADAMARD}",
            )
        rows = self.rows
        _need(
            isinstance(rows, tuple)
            and len(rows) == 2
            and all(map(_is_int, rows))
            and 1 <= rows[0] <= rows[1] <= MAX_ROWS,
            f"rows is {rows!r}; write the first and the last, from 1 to {MAX_ROWS}",
        )
        _need(
            _is_int(self.block_rows) and self.block_rows in BLOCK_ROWS,
            f"block_rows is {self.block_rows!r}; there are "
            f"{', '.join(map(str, BLOCK_ROWS))}",
        )
        _need(
            _is_int(self.splits) and 1 <= self.splits <= MAX_SPLITS,
            f"splits is {self.splits!r}; it can be 1 to {MAX_SPLITS}",
        )
        _need(
            isinstance(self.unrounded, bool),
            f"unrounded is {self.unrounded!r}; it is true or false",
        )
        _need(
            not self.unrounded or self.block_rows == UNROUNDED_ROWS,
            f"unrounded with block_rows {self.block_rows}; it needs {UNROUNDED_ROWS}",
        )


def read(path: Path) -> list[Plan]:
    """Reads a file of plans.

    Raises:
        PlanError: It is missing or malformed, or two plans are for one call.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: cannot be read as JSON: {error}") from error
    entries = content.get("plans") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise PlanError(f'{path}: no list "plans"; exl3/plans.py shows the format')
    plans = []
    for number, entry in enumerate(entries):
        try:
            plans.append(_plan(entry))
        except PlanError as error:
            raise PlanError(f"{path}: plans[{number}]: {error}") from error
    try:
        check_disjoint(plans)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return plans


def write(path: Path, plans: Iterable[Plan]) -> None:
    """Writes a file of plans, one a line."""
    lines = ",\n".join(f"  {json.dumps(vars(plan))}" for plan in plans)
    path.write_text(f'{{"plans": [\n{lines}\n]}}\n', encoding="utf-8")


def check_disjoint(plans: Iterable[Plan]) -> None:
    """Refuses two plans for one call.

    Raises:
        PlanError: There are two.
    """
    by_size: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    for plan in plans:
        by_size[plan.architecture, plan.k, plan.n].append(plan.rows)
    for (architecture, k, n), ranges in by_size.items():
        ranges.sort()
        for before, after in pairwise(ranges):
            _need(
                before[1] < after[0],
                f"two plans for {architecture}, k {k}, n {n}: rows {before[0]} to "
                f"{before[1]} and {after[0]} to {after[1]}",
            )


def _plan(entry: Any) -> Plan:
    _need(isinstance(entry, dict), f"{entry!r} is no object")
    fields = set(Plan.__dataclass_fields__)
    unknown = sorted(set(entry) - fields)
    _need(not unknown, f"unknown {', '.join(unknown)}")
    missing = sorted(fields - set(entry) - {"unrounded"})
    _need(not missing, f"{', '.join(missing)} missing")
    rows = entry["rows"]
    return Plan(**entry | {"rows": tuple(rows) if isinstance(rows, list) else rows})


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
