# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads the headers of a folder of safetensors files, and no weight.

The format: 8 bytes of little-endian header length, then that many bytes of JSON
(https://huggingface.co/docs/safetensors, "Format"). A checkpoint is untrusted, so
lengths and shapes are bounded before anything is allocated for them.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3.checkpoint.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
#: The limit that the safetensors library itself sets.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One stored tensor: where it lies and how it looks."""

    name: str
    dtype: str  # as safetensors spells it: "BF16", "I16", ...
    shape: tuple[int, ...]
    file: str  # name of the safetensors file in the checkpoint's folder


def read_folder(folder: Path) -> tuple[TensorHeader, ...]:
    """The headers of every tensor of a checkpoint.

    The index, where there is one, decides which files belong to the checkpoint.

    Args:
        folder: The checkpoint's folder.

    Returns:
        One entry a tensor; empty if the folder holds no safetensors files.

    Raises:
        CheckpointError: A file is missing, damaged or outside the folder.
    """
    names = _shard_names(folder)
    return tuple(header for name in names for header in read_header(folder / name))


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when a checkpoint's files do, told without reading any.

    Returns:
        The name, size in bytes and time of change in ns of the index and each shard.

    Raises:
        CheckpointError: A file is a link to nothing.
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob(INDEX_FILE)])
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}") from error
        found.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


def read_header(file: Path) -> Iterator[TensorHeader]:
    """The tensors that one safetensors file says it holds.

    Raises:
        CheckpointError: The header is damaged or exceeds a bound.
    """
    for name, entry in _header_json(file).items():
        if name == "__metadata__":
            continue
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_DIMENSIONS
            or not all(type(size) is int and 0 <= size < 2**48 for size in shape)
        ):
            raise CheckpointError(
                f"{file.name}: tensor {name!r} has shape {shape!r}, not a list of at "
                f"most {MAX_DIMENSIONS} sizes; the file is damaged, fetch it again"
            )
        yield TensorHeader(name, str(entry.get("dtype")), tuple(shape), file.name)


def _header_json(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            total = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if total < 8 or length > min(total - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file.name}: header of {length} bytes in a file of {total}; "
                    "the file is truncated or damaged, fetch it again"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{file.name}: header is not JSON ({error}); the file is damaged, "
            "fetch it again"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.name}: header is not a JSON object")
    return header


def _shard_names(folder: Path) -> list[str]:
    index = folder / INDEX_FILE
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors"))
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except OSError as error:
        raise CheckpointError(f"{index}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{INDEX_FILE}: has no weight_map from tensor to file ({error})"
        ) from error
    for name in names:
        if not isinstance(name, str) or name != Path(name).name:
            raise CheckpointError(
                f"{INDEX_FILE}: weight_map names the file {name!r}, which is not "
                "in the checkpoint's folder"
            )
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{INDEX_FILE}: weight_map names {name}, which is missing from "
                f"{folder}; fetch it, or rebuild the index"
            )
    return names
