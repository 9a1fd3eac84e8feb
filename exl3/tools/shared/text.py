# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Text as tokens of a checkpoint's tokenizer, in windows that a model reads at once."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from exl3.format.errors import FileError
from exl3.tools.shared.errors import ToolError

TOKENIZER_FILE = "tokenizer.json"


def read_tokenizer(folder: Path) -> Tokenizer:
    """A checkpoint's tokenizer.

    Raises:
        FileError: There is none, or it cannot be used.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise FileError(
            f"{file}: is not there; copy the tokenizer's files into the checkpoint"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise FileError(f"{file}: {reason[:200]}; fetch the file again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_text(file: Path) -> str:
    """The text of a file, with the line ends that it has.

    Raises:
        ToolError: It is no file, is empty, or is not UTF-8.
    """
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ToolError(
            f"{file}: byte {error.start} is not UTF-8; give a file of plain text"
        ) from error
    except OSError as error:
        raise ToolError(
            f"{file}: {error.strerror}; give a file of plain text"
        ) from error
    if not text.strip():
        raise ToolError(f"{file}: is empty; give a file of plain text")
    return text


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens, without any special ones.

    Attributes:
        text: The text.
        encoding: What a tokenizer made of it.
    """

    text: str
    encoding: Encoding

    @cached_property
    def tokens(self) -> Tensor:
        """Token ids, int64 `[tokens]`."""
        return torch.tensor(self.encoding.ids, dtype=torch.int64)

    def num_bytes(self, begin: int, end: int) -> int:
        """UTF-8 bytes of the tokens in `[begin, end)`, with what lies between them.

        A token's bytes begin where the token before it ends.
        """
        offsets = self.encoding.offsets
        first = offsets[begin - 1][1] if begin else 0
        last = offsets[end - 1][1] if end < len(offsets) else len(self.text)
        return len(self.text[first:last].encode())


def tokenize(folder: Path, file: Path) -> TokenizedText:
    """Reads a text with a checkpoint's tokenizer.

    Raises:
        ToolError: The text cannot be read or has fewer than two tokens.
        FileError: The tokenizer cannot be read.
    """
    text = read_text(file)
    encoding = read_tokenizer(folder).encode(text, add_special_tokens=False)
    if len(encoding.ids) < 2:
        raise ToolError(f"{file}: is a single token; give more text")
    return TokenizedText(text, encoding)


def read_windows(
    folder: Path, text_file: Path, window: int, limit: int | None = None
) -> Tensor:
    """Cuts a text into windows of equal length; what is left at its end is dropped.

    Args:
        folder: The checkpoint, whose tokenizer is used.
        text_file: A file of UTF-8 text.
        window: Tokens of a window.
        limit: Windows at most, from the text's beginning; None for all.

    Returns:
        Token ids, int64 `[windows, window]`, at least one window.

    Raises:
        ToolError: The text cannot be read, or is shorter than a window.
        FileError: The tokenizer cannot be read.
    """
    tokens = tokenize(folder, text_file).tokens
    count = len(tokens) // window
    if not count:
        raise ToolError(
            f"{text_file}: has {len(tokens)} tokens, fewer than a window of {window}; "
            "give more text, or a smaller window"
        )
    windows = tokens[: count * window].view(count, window)
    return windows if limit is None else windows[:limit]
