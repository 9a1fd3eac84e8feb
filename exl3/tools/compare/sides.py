# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Opens the two models that are compared, and checks that they speak one language."""

from collections.abc import Sequence
from pathlib import Path

from exl3.tools.compare.local import LocalModel
from exl3.tools.compare.server import Server
from exl3.tools.compare.windows import WindowedText
from exl3.tools.shared.errors import ToolError
from exl3.tools.shared.text import TOKENIZER_FILE, read_tokenizer


def open_side(name: str, logprobs: int) -> LocalModel | Server:
    """A checkpoint of a folder, or a server.

    Args:
        name: The folder or the address.
        logprobs: Tokens to ask a server for at each position.

    Raises:
        ToolError: There is no such folder, or the server does not answer.
        CheckpointError: The checkpoint cannot be run.
    """
    if name.startswith(("http://", "https://")):
        return Server(name, logprobs)
    folder = Path(name)
    if not folder.is_dir():
        raise ToolError(
            f"{name}: is no folder; name a checkpoint's folder, or a server's address "
            "with http:// or https://"
        )
    return LocalModel(folder)


def pick_tokenizer(sides: Sequence[LocalModel | Server], named: Path | None) -> Path:
    """The folder whose tokenizer cuts the text: a checkpoint's own, if there is one.

    Raises:
        ToolError: Both are servers, and none was named.
    """
    if named is not None:
        return named
    for side in sides:
        if isinstance(side, LocalModel):
            return side.folder
    raise ToolError(
        "--tokenizer: A and B are both servers; name a folder with their tokenizer.json"
    )


def check_alike(
    sides: Sequence[LocalModel | Server], folder: Path, text: WindowedText
) -> None:
    """Refuses models whose tokens differ.

    Raises:
        ToolError: The sizes of their vocabularies differ, or their tokenizers do.
    """
    tokenizer = read_tokenizer(folder)
    vocabulary = tokenizer.get_vocab()
    local = [side for side in sides if isinstance(side, LocalModel)]
    if len({side.vocabulary for side in local}) > 1:
        sizes = " and ".join(f"{side.name} has {side.vocabulary}" for side in local)
        raise ToolError(
            f"vocab_size: {sizes}; a divergence needs one vocabulary, so compare "
            "checkpoints of one model"
        )
    for other in {side.folder for side in local} - {folder}:
        theirs = read_tokenizer(other).get_vocab()
        if theirs != vocabulary:
            token = min(theirs.items() ^ vocabulary.items())[0]
            one, two = theirs.get(token), vocabulary.get(token)
            raise ToolError(
                f"{other / TOKENIZER_FILE}: the token {token!r} is {one}, and in "
                f"{folder} it is {two}; a divergence needs one vocabulary, so compare "
                "checkpoints of one model"
            )
    ids = tokenizer.encode(text.head, add_special_tokens=False).ids
    for side in sides:
        if isinstance(side, Server):
            side.check_tokens(text.head, ids, folder)
