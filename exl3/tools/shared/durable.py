# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Files that are there whole or not at all, also after a crash or a loss of power."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from exl3.checkpoint.file_header import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

#: How safetensors spells the types of torch.
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


@contextmanager
def durable_file(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes its place when it is whole and on disk.

    Args:
        path: The file to make or to replace.
        temporary: Where it lies meanwhile, on the same file system.

    Raises:
        OSError: It cannot be written; `filename` is `path`.
    """
    try:
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Brings names that were made, changed or removed in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any, temporary: Path) -> None:
    """Writes a JSON file; see `durable_file`."""
    with durable_file(path, temporary) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def write_safetensors(
    path: Path, tensors: Mapping[str, "Tensor"], temporary: Path
) -> None:
    """Writes a safetensors file; see `durable_file`.

    The library's own function keeps a second copy of all tensors in memory, and does
    not tell which error of the system it met. As it does, this one puts types of wide
    elements first, so that every tensor is aligned.
    """
    import torch

    def place(name: str) -> tuple[int, str]:
        return -tensors[name].element_size(), name

    order = sorted(tensors, key=place)
    header = _header(
        (
            name,
            _DTYPES[str(tensors[name].dtype).removeprefix("torch.")],
            tensors[name].shape,
            tensors[name].nbytes,
        )
        for name in order
    )
    with durable_file(path, temporary) as file:
        file.write(header)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1)
            file.write(memoryview(flat.view(torch.uint8).numpy()))


def write_header(path: Path, tensors: Iterable[TensorHeader]) -> None:
    """Writes a safetensors file of the right size that has a header and no weights."""
    tensors = list(tensors)
    header = _header((it.name, it.dtype, it.shape, it.num_bytes) for it in tensors)
    size = sum(it.num_bytes for it in tensors)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)


def _header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """A header of tensors that lie end to end: name, dtype, shape and bytes of each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, num_bytes in tensors:
        end = at + num_bytes
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
