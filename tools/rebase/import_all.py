# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Imports the modules that are named on stdin, and says which do not import.

A program of its own, run by the rehearsal where the new tree is first on the path.
Prints one JSON object as its last line: `{module: reason}`.
"""

import importlib
import json
import sys


def main() -> None:
    """Imports them in one process, as an engine does."""
    failed = {}
    for module in sys.stdin.read().split():
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever upstream or a requirement raises
            reason = (str(error).splitlines() or [""])[0]
            failed[module] = f"{type(error).__name__}: {reason}"
    print(f"\n{json.dumps(failed)}", flush=True)


if __name__ == "__main__":
    main()
