# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Refusals of a checkpoint: the first one, or all that do not follow from another."""

from collections.abc import Iterator
from contextlib import contextmanager

from exl3.format.errors import CheckpointError


class Problems:
    """What is wrong with a checkpoint.

    A server stops at the first problem. A tool that shows a checkpoint to a person
    collects them, and stops where what follows would only repeat them.

    Args:
        collect: Whether to go on after a problem.
    """

    def __init__(self, collect: bool = False):
        self._collect = collect
        self.found: list[CheckpointError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Takes note of a refusal within, or lets it through."""
        try:
            yield
        except CheckpointError as error:
            if not self._collect:
                raise
            self.found.append(error)

    def stop(self) -> None:
        """Ends here if there was a problem, since what follows builds on it.

        Raises:
            CheckpointError: The first problem.
        """
        if self.found:
            raise self.found[0]
