# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The command `exl3`."""

import argparse
import os
import sys
from collections.abc import Sequence

from exl3.format.errors import CheckpointError
from exl3.tools import inspect


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code.

    A refused checkpoint is one line on stderr, and exit code 1.
    """
    parser = argparse.ArgumentParser(
        prog="exl3", description="Tools for EXL3 checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except CheckpointError as error:
        print(f"exl3: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
