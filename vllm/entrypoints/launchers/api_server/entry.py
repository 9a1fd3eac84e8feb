# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The API server, which says by its exit code that it refused, or that its engine died.

See docs/upstream/server-exit-code.md.
"""

import asyncio
from argparse import Namespace
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server import entry_upstream as upstream
from vllm.fork import extend
from vllm.refusal import collected_refusals, refusal_in

_upstream_build_and_serve = upstream.build_and_serve
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


async def build_and_serve(
    engine_client: EngineClient, *args: Any, **kwargs: Any
) -> asyncio.Task:
    """Serves until the server is told to stop, or its engine dies.

    Returns:
        What is left to await once the engine is shut down.

    Raises:
        SystemExit: The engine died.
    """
    told_to_stop = False
    shut_down = engine_client.shutdown

    def stop(*args: Any, **kwargs: Any) -> None:
        nonlocal told_to_stop
        told_to_stop = True
        shut_down(*args, **kwargs)

    # Nothing else tells a death from a stop: either leaves an engine in error.
    engine_client.shutdown = stop
    rest = await _upstream_build_and_serve(engine_client, *args, **kwargs)
    if engine_client.errored and not told_to_stop:
        await rest
        raise SystemExit("error: the engine died, and the server with it; see above.")
    return rest


extend(__name__, upstream)
