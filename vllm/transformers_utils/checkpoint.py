# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a checkpoint's headers say, read once for all who ask.

An engine asks many times: for the config, the draft's config, the tokenizer's and the
processor's, and each time for the widths and the quantization.
"""

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import regex as re

from exl3.checkpoint.headers import fingerprint
from exl3.checkpoint.hub import fetch_headers
from exl3.checkpoint.metadata import read_metadata
from exl3.checkpoint.plan import Checkpoint, read_checkpoint, read_config
from exl3.format.errors import FileError
from vllm.logger import init_logger

logger = init_logger(__name__)

_SHARD = re.compile(r"-of-([0-9]{1,6})\.safetensors$")


def known_checkpoint(model: str | Path, revision: str | None) -> Checkpoint | None:
    """What is stored of a model, on this machine or on the hub; None if unknown.

    Of an EXL3 checkpoint on the hub the headers are read, so that one that cannot be
    served is refused before it is downloaded.

    Args:
        model: A folder, or an id on the hub.
        revision: The revision of the hub's checkpoint.

    Raises:
        CheckpointError: The checkpoint contradicts itself or cannot be served.
    """
    checkpoint = stored_checkpoint(model, revision)
    if checkpoint is not None or Path(model).is_dir():
        return checkpoint
    return _on_hub(str(model), revision)


@lru_cache(maxsize=4)
def _on_hub(model: str, revision: str | None) -> Checkpoint | None:
    """What the hub stores of a model whose config says that it is EXL3.

    Its config has been fetched by whoever asks. Nothing is asked of the hub for others.
    """
    config = _cached_config(model, revision)
    if config is None or not config.is_file():
        return None
    if not read_metadata(config.parent, read_config(config.parent)).declared:
        return None
    with TemporaryDirectory(prefix="exl3-") as temporary:
        try:
            fetch_headers(model, revision, Path(temporary))
        except FileError as error:
            logger.warning("%s; it is checked when it has been downloaded", error)
            return None
        return read_folder(Path(temporary))


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
    config = _cached_config(model, revision)
    if config is None:
        return None
    folder = config.parent
    names = [path.name for path in folder.glob("*.safetensors")]
    # Shards come before their index, which would say what is missing.
    of = [int(found[1]) for name in names if (found := _SHARD.search(name))]
    return folder if len(names) >= max(of, default=1) else None


def _cached_config(model: str, revision: str | None) -> Path | None:
    """A model's config.json in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(config) if isinstance(config, str) else None
