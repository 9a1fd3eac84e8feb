# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Numbers among a command's arguments, for argparse's `type`."""

import argparse
import re
from collections.abc import Callable

#: Nothing that is counted here is more.
_MOST = 10**12


def count(least: int = 1) -> Callable[[str], int]:
    """A whole number of something, at least so many."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,12}", text) or not least <= int(text) < _MOST:
            raise argparse.ArgumentTypeError(
                f"{text} is no count; expected {least} or more"
            )
        return int(text)

    return parse


def number(what: str, low: float, high: float) -> Callable[[str], float]:
    """A number from `low` to `high`, but for 0; `what` names it in the message."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high or not value:
            raise argparse.ArgumentTypeError(
                f"{text} is no {what}; expected {low:g} to {high:g}"
            )
        return value

    return parse
