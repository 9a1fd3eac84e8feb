# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Copies of checkpoints with something changed, for tests of what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.checkpoints import Tensors, save_checkpoint


def with_tensors(path: Path, out: Path, change: Callable[[Tensors], Any]) -> Path:
    """Copies a checkpoint, with other tensors.

    Args:
        path: The checkpoint.
        out: The folder to write.
        change: Changes the tensors, by name, in place.

    Returns:
        `out`, which has as many shards as `path`.
    """
    files = sorted(path.glob("*.safetensors"))
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    change(tensors)
    shutil.copytree(path, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((path / "config.json").read_text())
    return save_checkpoint(out, config, tensors, shards=len(files))


def with_json(
    path: Path, out: Path, change: Callable[[dict], Any], file: str = "config.json"
) -> Path:
    """Copies a checkpoint, with other metadata.

    Args:
        path: The checkpoint.
        out: The folder to write. Its tensors are links to those of `path`.
        change: Changes the parsed file in place.
        file: Which of the checkpoint's JSON files.

    Returns:
        `out`.
    """
    out.mkdir(parents=True)
    for source in path.iterdir():
        if source.name != file:
            (out / source.name).symlink_to(source)
    value = json.loads((path / file).read_text())
    change(value)
    (out / file).write_text(json.dumps(value))
    return out


def draft_alone(path: Path, out: Path) -> Path:
    """Copies a checkpoint's MTP layers and nothing else of its tensors."""
    first = json.loads((path / "config.json").read_text())["num_hidden_layers"]

    def drop_trunk(tensors: Tensors) -> None:
        for name in list(tensors):
            layer = name.partition("layers.")[2].partition(".")[0]
            if not layer or int(layer) < first:
                del tensors[name]

    return with_tensors(path, out, drop_trunk)
