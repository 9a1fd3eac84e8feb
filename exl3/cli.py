# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The command `exl3`."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

from exl3.format.errors import CheckpointError
from exl3.tools.compare import command as compare
from exl3.tools.graft import command as graft
from exl3.tools.inspect import command as inspect
from exl3.tools.prune import command as prune
from exl3.tools.quantize import command as quantize
from exl3.tools.shared.errors import ToolError
from exl3.tools.verify import command as verify

#: The modules of the commands, each with `add_command`, in the order of the help.
COMMANDS: tuple[Any, ...] = (inspect, prune, quantize, graft, verify, compare)
#: What to do about an error of the system.
_REMEDIES = {
    errno.ENOSPC: "free some space, and run it again",
    errno.EDQUOT: "free some of your quota, and run it again",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f), and run it again",
    errno.EROFS: "write to another file system",
    errno.EACCES: "change its permissions, or name another place",
    errno.EPERM: "change its permissions, or name another place",
    errno.ELOOP: "a symbolic link leads back to itself; mend it",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code.

    What a user can mend is one line on stderr, and exit code 1; 130 stands for Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="exl3", description="Tools for EXL3 checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()  # fails here, where it is told, rather than at the exit
        return code or 0
    except (CheckpointError, ToolError) as error:
        return _tell(str(error))
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _tell(_explain(error))
    except KeyboardInterrupt:
        resume = "; --resume goes on from here" if hasattr(options, "resume") else ""
        _tell(f"stopped{resume}")
        return 130


def _explain(error: OSError) -> str:
    """What went wrong with which file, and what to do."""
    if error.errno is None:  # of a library, not of the system
        return " ".join(str(error).split())
    where = error.filename2 or error.filename or "output"
    remedy = _REMEDIES.get(error.errno)
    return f"{where}: {error.strerror}" + (f"; {remedy}" if remedy else "")


def _tell(line: str) -> int:
    print(f"exl3: {line}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
