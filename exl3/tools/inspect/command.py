# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 inspect`: how a checkpoint is stored and what serving it takes.

Headers only: no weight is read, and of a checkpoint on the hub none is fetched. What is
accepted here, the server loads: both ask the same reader.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.hub import checkpoint_folder
from exl3.checkpoint.plan import (
    read_config,
    survey,
    text_config,
    without_collection,
)
from exl3.checkpoint.problems import Problems
from exl3.checkpoint.ranks import check_tensor_parallel
from exl3.format.errors import CheckpointError
from exl3.tools.inspect.memory import GIB
from exl3.tools.inspect.report import Machine, summarize
from exl3.tools.inspect.table import lines
from exl3.tools.shared.arguments import count, number

#: Problems that are shown; one cause may have many.
_MOST_SHOWN = 20


def add_command(commands: Any) -> None:
    """Adds `inspect` to the commands of `exl3`."""
    parser = commands.add_parser(
        "inspect",
        help="show how a checkpoint is stored, and what serving it takes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a folder, or an id on the hub: org/name[@revision]",
    )
    machine = parser.add_argument_group("the machine, to tell whether it fits")
    machine.add_argument(
        "--tp", type=count(), metavar="N", help="tensor-parallel ranks"
    )
    machine.add_argument(
        "--gpu-memory", type=_gib, metavar="GiB", help="memory of one GPU"
    )
    machine.add_argument("--gpus", type=count(), metavar="N", help="GPUs at hand")
    machine.add_argument(
        "--max-model-len", type=count(), metavar="N", help="tokens that must fit"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--all", action="store_true", help="a line for every layer, alike or not"
    )
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw widths and bits by layer (.png, .svg, .pdf)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the report of a checkpoint; returns 1 if it has problems.

    Raises:
        ToolError: The plot cannot be drawn.
    """
    machine = Machine(
        options.tp, options.gpus, options.gpu_memory, options.max_model_len
    )
    problems = Problems(collect=True)
    report: dict[str, Any] = {}
    try:
        with checkpoint_folder(options.path) as folder, without_collection():
            report = _inspect(folder, machine, problems)
    except CheckpointError as error:
        if error not in problems.found:
            problems.found.append(error)
    told = [*map(str, problems.found), *report.get("problems", ())]
    if report and options.plot is not None:
        from exl3.tools.inspect.plot import draw

        draw(report, options.plot, title=Path(options.path).name)
    if options.json:
        print(json.dumps({"path": options.path, **report, "problems": told}, indent=2))
    elif report:
        print("\n".join(lines(report, options.all)), flush=True)
    _tell(told)
    return 1 if told else 0


def _inspect(folder: Path, machine: Machine, problems: Problems) -> dict[str, Any]:
    config = read_config(folder)
    found = survey(folder, config, problems)
    widths = None
    with problems.noted():
        widths = resolve_widths(text_config(config), found.checkpoint.widths)
    if machine.tp is not None:
        with problems.noted():
            check_tensor_parallel(found.checkpoint.plan, config, machine.tp)
    problems.stop()
    return summarize(found, config, widths, machine)


def _tell(problems: Sequence[str]) -> None:
    for problem in problems[:_MOST_SHOWN]:
        print(f"exl3: {problem}", file=sys.stderr)
    if len(problems) > _MOST_SHOWN:
        print(f"exl3: and {len(problems) - _MOST_SHOWN} more problems", file=sys.stderr)


def _gib(text: str) -> int:
    return int(number("number of GiB", 0, 2**20)(text) * GIB)
