# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Extends the engine's process, which ends when the process that started it is gone.

See docs/upstream/engine-outlives-server.md.
"""

import multiprocessing
import os
import threading
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.fork import extend
from vllm.logger import init_logger
from vllm.v1.engine import core_upstream as upstream

logger = init_logger(__name__)

_upstream_run_engine_core = upstream.EngineCoreProc.run_engine_core


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Runs an engine until it is told to stop, or its parent process is gone."""
    if parent := multiprocessing.parent_process():
        threading.Thread(
            target=_end_with, args=(parent,), name="end-with-parent", daemon=True
        ).start()
    _upstream_run_engine_core(*args, **kwargs)


def _end_with(parent: BaseProcess) -> None:
    """Ends this process at once when another one has ended.

    Nobody is left to drain requests for. Workers watch this process in the same way,
    and free the device.
    """
    connection.wait([parent.sentinel])
    logger.error("The process that started this engine (%d) is gone.", parent.pid)
    os._exit(1)


upstream.EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
extend(__name__, upstream)
