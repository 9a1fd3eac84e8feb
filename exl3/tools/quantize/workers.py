# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Threads that each compute on one core.

The bits of a product may depend on how many threads compute it. Here every task runs
on one, and the tasks are the same whatever the number of threads, and so are the bits.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class StoppedError(Exception):
    """A task ends early, since another one has failed."""


class Workers:
    """Runs tasks, and tasks that are made of tasks.

    The former are run by as many threads as cores are to be used. The latter have
    threads of their own, which mostly wait.

    Args:
        threads: Cores to use.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._before = torch.get_num_threads()
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(threads, initializer=_use_one_core)
        self._leads = ThreadPoolExecutor(threads + 1, initializer=_use_one_core)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._pool.shutdown(cancel_futures=True)
        self._leads.shutdown(cancel_futures=True)
        # A thread's own setting is also that of threads that begin later.
        torch.set_num_threads(self._before)

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item]
    ) -> list[Result]:
        """Applies a function to all items; results come in their order."""
        return list(self._pool.map(function, items))

    def lead(
        self, function: Callable[[Item], Result], items: Iterable[Item], at_once: int
    ) -> Iterator[Result]:
        """Applies a function that calls `map` itself; results come in order.

        Args:
            function: What to do with each item.
            items: Taken one by one as they are needed.
            at_once: Items, or their results, that may be in memory together.
        """
        pending: deque[Future[Result]] = deque()
        at_once = max(1, min(at_once, self.threads + 1))
        for item in items:
            if len(pending) == at_once:
                yield pending.popleft().result()
            pending.append(self._leads.submit(function, item))
        while pending:
            yield pending.popleft().result()

    def check(self, *_: Any) -> None:
        """Ends the task that calls it if all are to end.

        Raises:
            StoppedError: They are.
        """
        if self._stopping.is_set():
            raise StoppedError


def _use_one_core() -> None:
    torch.set_num_threads(1)
