# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The text that two models are compared on, in windows."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from exl3.tools.shared.errors import ToolError
from exl3.tools.shared.text import tokenize


@dataclass(frozen=True)
class WindowedText:
    """A text in windows that overlap by one token.

    So every token but the text's first is predicted once, from at most `window - 1`
    tokens before it.

    Attributes:
        file: Where the text lies.
        head: Its beginning, to compare tokenizers by.
        windows: Token ids of each `[tokens]`; the last one may be shorter.
        window: Tokens of all others.
        num_bytes: UTF-8 bytes of the tokens that are predicted.
    """

    file: Path
    head: str
    windows: list[Tensor]
    window: int
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted."""
        return sum(len(window) - 1 for window in self.windows)


#: Characters that stand for the whole text where tokenizers are compared.
_HEAD = 4096


def cut(
    folder: Path, file: Path, window: int | None, longest: int, limit: int | None
) -> WindowedText:
    """Reads a text and cuts it.

    Args:
        folder: The checkpoint whose tokenizer is used.
        file: A file of UTF-8 text.
        window: Tokens of a window; None for `longest`.
        longest: Tokens that both models can read at once.
        limit: Windows at most; None for all.

    Raises:
        ToolError: The text cannot be read, or a window is longer than `longest`.
        FileError: The tokenizer cannot be read.
    """
    window = longest if window is None else window
    if window > longest:
        raise ToolError(
            f"--window {window}: the models read at most {longest} tokens at once; use "
            "that or less"
        )
    text = tokenize(folder, file)
    tokens = text.tokens
    step = window - 1
    windows = [
        tokens[begin : begin + window] for begin in range(0, len(tokens) - 1, step)
    ][:limit]
    end = 1 + sum(len(part) - 1 for part in windows)
    return WindowedText(
        file, text.text[:_HEAD], windows, window, text.num_bytes(1, end)
    )
