# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a checkpoint's headers say, read once for all who ask.

An engine asks many times: for the config, the draft's config, the tokenizer's and the
processor's, and each time for the widths and the quantization.
"""

from functools import lru_cache
from pathlib import Path

import regex as re

from exl3.checkpoint.headers import fingerprint
from exl3.checkpoint.plan import Checkpoint, read_checkpoint, read_config
from exl3.format.errors import FileError
from vllm.logger import init_logger

logger = init_logger(__name__)

_SHARD = re.compile(r"-of-([0-9]{1,6})\.safetensors$")


def stored_checkpoint(model: str | Path, revision: str | None) -> Checkpoint | None:
    """What is stored of a model; None if it is not, or not whole, on this machine.

    Args:
        model: A folder, or an id on the hub.
        revision: The revision of the hub's checkpoint.

    Raises:
        CheckpointError: The checkpoint contradicts itself or cannot be served.
    """
    folder = local_folder(model, revision)
    if folder is None:
        return None
    try:
        return read_folder(folder)
    except FileError:
        if Path(model).is_dir():
            raise
        return None  # the index names a shard that is still to come


def read_folder(folder: Path) -> Checkpoint:
    """What is stored in a folder; no weight is read.

    Raises:
        CheckpointError: The checkpoint contradicts itself or cannot be served.
    """
    return _read(folder, fingerprint(folder))


@lru_cache(maxsize=4)
def _read(folder: Path, _files: object) -> Checkpoint:
    """Reads headers once for each state of the files.

    The answer is small; the headers of a million tensors are not, and are let go.
    """
    config = read_config(folder) if (folder / "config.json").is_file() else {}
    checkpoint = read_checkpoint(folder, config)
    for warning in checkpoint.plan.warnings:
        logger.warning(warning)
    return checkpoint


def local_folder(model: str | Path, revision: str | None) -> Path | None:
    """The folder that holds all of a checkpoint, or None if it is still to be fetched.

    Args:
        model: A folder, or an id on the hub.
        revision: The revision of the hub's checkpoint.
    """
    folder = Path(model)
    return folder if folder.is_dir() else _fetched_folder(str(model), revision)


def _fetched_folder(model: str, revision: str | None) -> Path | None:
    """Where the hub's cache keeps a checkpoint, unless shards are still to come."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    names = [path.name for path in folder.glob("*.safetensors")]
    # Shards come before their index, which would say what is missing.
    of = [int(found[1]) for name in names if (found := _SHARD.search(name))]
    return folder if len(names) >= max(of, default=1) else None
