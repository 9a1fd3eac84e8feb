# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Message queues whose readers on other machines can be told to stop waiting.

See docs/upstream/remote-reader-shutdown.md.
"""

import time
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast_upstream as upstream
from vllm.fork import extend

#: Seconds between two looks at whether the queue was shut down. A message is not held
#: up by it.
_LOOK_SECONDS = 1.0


class MessageQueue(upstream.MessageQueue):
    """Upstream's, whose `shutdown` wakes a remote reader as it does a local one."""

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Reads a message.

        Args:
            timeout: Seconds to wait for one; None waits for ever.
            indefinite: Whether long waits are usual, and not worth a warning.

        Raises:
            TimeoutError: None came in time.
            RuntimeError: The queue was shut down meanwhile.
        """
        if self._is_remote_reader:
            self._wait_for_remote(timeout)
        return super().dequeue(timeout, indefinite)

    def _wait_for_remote(self, timeout: float | None) -> None:
        """Waits until a message of another machine is there to be read."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.shutting_down:
            left = max(0.0, end - time.monotonic())
            if self.remote_socket.poll(timeout=int(1000 * min(left, _LOOK_SECONDS))):
                return
            if time.monotonic() >= end:
                raise TimeoutError
        raise RuntimeError("cancelled")


extend(__name__, upstream)
