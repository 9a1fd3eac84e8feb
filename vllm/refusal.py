# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Refusals: what the fork says when it will not serve, in one line."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from exl3.format.errors import CheckpointError
from exl3.plans import PlanError

# Names the file in which the processes of a server leave a refusal for it.
_FILE_VARIABLE = "HETERO_REFUSAL_FILE"


class RefusedOptionError(ValueError):
    """Options that cannot be had together, or not for this checkpoint.

    The message is one line that names them and says what to do.
    """


def refusal_in(error: BaseException) -> str | None:
    """The line of the refusal that an error carries, or None if it carries none.

    A refusal may be wrapped: pydantic collects what a config's checks raise, Ray what
    an actor raises, and code on the way may raise from it.
    """
    seen: BaseException | None = error
    while seen is not None:
        of_actor = getattr(seen, "cause", None)
        if isinstance(of_actor, Exception):
            # Ray's error is an instance of the cause's class too, but says much more.
            seen = of_actor
        if isinstance(seen, CheckpointError | PlanError | RefusedOptionError):
            return str(seen)
        if isinstance(seen, ValidationError):
            for entry in seen.errors():
                inner = entry.get("ctx", {}).get("error")
                line = refusal_in(inner) if isinstance(inner, Exception) else None
                if line is not None:
                    return line
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def collected_refusals() -> Iterator[Callable[[], str | None]]:
    """Collects the refusals of the processes that start in the meantime.

    A server learns of its engine and workers only that they failed to start; what
    weights show when they arrive is refused there.

    Yields:
        A function that returns the first line that any of them left, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "refusal"
        os.environ[_FILE_VARIABLE] = str(file)

        def first() -> str | None:
            lines = file.read_text().splitlines() if file.exists() else []
            return lines[0] if lines else None

        try:
            yield first
        finally:
            del os.environ[_FILE_VARIABLE]


@contextmanager
def leaving_refusals() -> Iterator[None]:
    """Leaves a refusal that is raised within for the server, if there is one."""
    try:
        yield
    except Exception as error:
        line, file = refusal_in(error), Path(os.environ.get(_FILE_VARIABLE, ""))
        # Ray hands the variable to ranks on other machines, which have no such folder.
        if line is not None and file.name and file.parent.exists():
            with file.open("a") as stream:
                stream.write(f"{line}\n")
        raise
