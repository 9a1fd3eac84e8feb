# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The files beside a checkpoint's weights."""

from pathlib import Path

from exl3.checkpoint.graft_record import GRAFT_FILE, ORIGINAL
from exl3.checkpoint.headers import INDEX_FILE

#: Files that hold weights in another form.
_WEIGHTS = frozenset(
    {
        *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".onnx"),
        ".msgpack",
        ORIGINAL,
    }
)


def companions(folder: Path) -> list[Path]:
    """Files that a model is served with, besides its weights: tokenizer, card, code."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and file.suffix not in _WEIGHTS
        and not file.name.endswith(INDEX_FILE.removeprefix("model.safetensors"))
        and not file.name.startswith(".")
        and file.name != GRAFT_FILE
    )
