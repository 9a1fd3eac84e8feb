# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The command `vllm`, of which `vllm exl3 ...` is the command `exl3 ...`."""

import sys

from vllm.entrypoints.cli import main_upstream as upstream
from vllm.fork import extend

_upstream_main = upstream.main


def main() -> None:
    """Runs a command.

    Those of `exl3` come before upstream's, whose modules take seconds to import. The
    package `vllm` itself has imported torch by now, to set it up before anything else
    does; `exl3 inspect` alone starts without it.
    """
    if sys.argv[1:2] == ["exl3"]:
        from exl3 import cli

        sys.exit(cli.main(sys.argv[2:]))
    _upstream_main()


extend(__name__, upstream)

if __name__ == "__main__":
    main()
