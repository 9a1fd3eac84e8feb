# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The API server, which ends with one line where the fork refuses to serve."""

from argparse import Namespace
from typing import Any

from vllm.entrypoints.launchers.api_server import entry_upstream as upstream
from vllm.fork import extend
from vllm.refusal import collected_refusals, refusal_in

_upstream_run_server = upstream.run_server


async def run_server(args: Namespace, **uvicorn_kwargs: Any) -> None:
    """Runs the server as upstream does.

    Raises:
        SystemExit: The checkpoint or the options are refused; says why.
    """
    with collected_refusals() as of_processes:
        try:
            await _upstream_run_server(args, **uvicorn_kwargs)
        except Exception as error:
            line = refusal_in(error) or of_processes()
            if line is None:
                raise
            raise SystemExit(f"error: {line}") from None


extend(__name__, upstream)
