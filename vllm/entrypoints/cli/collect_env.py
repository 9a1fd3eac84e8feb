# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Lists `exl3` among the commands of `vllm --help`.

Upstream takes what the `cmd_init` of each of these modules returns.
"""

from typing import Any

from vllm.entrypoints.cli import collect_env_upstream as upstream
from vllm.entrypoints.cli.types import CLISubcommand
from vllm.fork import extend

_upstream_cmd_init = upstream.cmd_init


class Exl3Subcommand(CLISubcommand):
    """A name and a line of help: `vllm` runs it before it parses anything."""

    name = "exl3"

    def subparser_init(self, subparsers: Any) -> Any:
        """Adds the command to the list."""
        return subparsers.add_parser(
            self.name,
            help="Inspect, prune, quantize, verify and compare EXL3 checkpoints.",
        )


def cmd_init() -> list[CLISubcommand]:
    """Upstream's command, and `exl3`."""
    return [*_upstream_cmd_init(), Exl3Subcommand()]


extend(__name__, upstream)
