# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Refusals: what the fork says when it will not serve, in one line."""

from pydantic import ValidationError

from exl3.format.errors import CheckpointError


class RefusedOptionError(ValueError):
    """Options that cannot be had together, or not for this checkpoint.

    The message is one line that names them and says what to do.
    """


def refusal_in(error: BaseException) -> str | None:
    """The line of the refusal that an error carries, or None if it carries none.

    A refusal may be wrapped: pydantic collects what a config's checks raise, and code
    on the way may raise from it.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CheckpointError | RefusedOptionError):
            return str(seen)
        if isinstance(seen, ValidationError):
            for entry in seen.errors():
                inner = entry.get("ctx", {}).get("error")
                line = refusal_in(inner) if isinstance(inner, Exception) else None
                if line is not None:
                    return line
        seen = seen.__cause__ or seen.__context__
    return None
