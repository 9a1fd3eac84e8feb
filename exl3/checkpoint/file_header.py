# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads the header of a safetensors file, and no weight.

The format: 8 bytes of little-endian header length, then that many bytes of JSON
(https://huggingface.co/docs/safetensors, "Format"), then the tensors without gaps. A
checkpoint is untrusted, so all sizes are bounded before anything is done with them.
"""

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from reprlib import repr as brief  # a hostile value must not fill the log
from typing import Any, NamedTuple

from exl3.checkpoint.json_files import parse_json
from exl3.format.errors import FileError

#: The limit that the safetensors library itself sets.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
MAX_NAME_LENGTH = 1000
MAX_DTYPE_LENGTH = 20
#: Bits of an element. A file may have types that are newer than this list.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class TensorHeader(NamedTuple):
    """One stored tensor: where it lies and how it looks."""

    name: str
    dtype: str  # as safetensors spells it: "BF16", "I16", ...
    shape: tuple[int, ...]
    file: str  # name of the safetensors file in the checkpoint's folder

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor takes, 0 for an unknown dtype."""
        return math.prod(self.shape) * DTYPE_BITS.get(self.dtype, 0) // 8


def read_header(file: Path) -> list[TensorHeader]:
    """The tensors that one safetensors file says it holds.

    Raises:
        FileError: The header is damaged or exceeds a bound, or the file's size is not
            what the header needs.
    """
    header, num_bytes = _header_json(file)
    where = file.name
    _check_metadata(where, header.pop("__metadata__", None))
    known: dict[Any, tuple[str, tuple[int, ...], int | None]] = {}
    spans = []
    headers = []
    check_names(header, where)
    for name, entry in header.items():
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            found = known.get((dtype, shape))
        except (KeyError, TypeError, ValueError):
            raise _damaged(where, name, entry) from None
        if found is None:
            found = known[dtype, shape] = _checked(where, name, entry)
        dtype, shape, size = found
        if not (type(begin) is type(end) is int and 0 <= begin <= end < 2**63):
            raise _damaged(where, name, entry)
        if size is not None and end - begin != size:
            raise FileError(
                f"{where}: tensor {name!r} is {dtype} of shape {list(shape)}, {size} "
                f"bytes, but its data_offsets give it {end - begin}; the file is "
                "damaged, fetch it again"
            )
        spans.append((begin, end, name))
        headers.append(TensorHeader(name, dtype, shape, where))
    _check_spans(where, spans, num_bytes)
    return headers


def check_names(names: Collection[str], where: str) -> None:
    """Refuses tensors' names that cannot stand in a line of text.

    Args:
        names: Perhaps a million, so they are first looked at all at once.
        where: The file that has them, for the refusal.
    """
    if len(max(names, key=len, default="")) <= MAX_NAME_LENGTH and (
        "".join(names).isprintable()
    ):
        return
    for name in names:
        if len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise FileError(
                f"{where}: has a tensor with the name {brief(name)}; expected at most "
                f"{MAX_NAME_LENGTH} printable characters"
            )


def _header_json(file: Path) -> tuple[dict[str, Any], int]:
    """The parsed header, and the number of bytes after it."""
    try:
        if file.exists() and not file.is_file():
            raise FileError(f"{file}: is no file; remove it, or put the file there")
        with file.open("rb") as stream:
            total = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if total < 8 or length > min(total - 8, MAX_HEADER_BYTES):
                raise FileError(
                    f"{file.name}: header of {length} bytes in a file of {total}; "
                    "the file is truncated or damaged, fetch it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise FileError(f"{file}: {error.strerror}") from error
    header = parse_json(text, f"{file.name}: header")
    if not isinstance(header, dict):
        raise FileError(f"{file.name}: header is not a JSON object")
    return header, total - 8 - length


def _check_metadata(where: str, metadata: object) -> None:
    """The safetensors library takes no other, and would say so as weights are read."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or any(
        not isinstance(value, str) for value in metadata.values()
    ):
        raise FileError(
            f"{where}: header has the __metadata__ {brief(metadata)}; expected an "
            "object from text to text: write the file again"
        )


def _checked(
    where: str, name: str, entry: Mapping[str, Any]
) -> tuple[str, tuple[int, ...], int | None]:
    """Type, shape and bytes of a tensor, the last None for an unknown type."""
    dtype, shape = entry["dtype"], entry["shape"]
    if (
        not isinstance(dtype, str)
        or not (dtype.isprintable() and len(dtype) <= MAX_DTYPE_LENGTH)
        or not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size < 2**48 for size in shape)
    ):
        raise _damaged(where, name, entry)
    bits = DTYPE_BITS.get(dtype)
    size = None if bits is None else -(-math.prod(shape) * bits // 8)
    return dtype, tuple(shape), size


def _damaged(where: str, name: str, entry: Any) -> FileError:
    return FileError(
        f"{where}: tensor {brief(name)} has the entry {brief(entry)}; expected a "
        f"dtype, a shape of at most {MAX_DIMENSIONS} sizes and two data_offsets; the "
        "file is damaged, fetch it again"
    )


def _check_spans(where: str, spans: list[tuple[int, int, str]], num_bytes: int) -> None:
    """Tensors must lie end to end, and fill the file."""
    spans.sort()
    at, before = 0, "the header"
    for begin, end, name in spans:
        if begin != at:
            raise FileError(
                f"{where}: tensor {name!r} begins at byte {begin}, but {before} ends "
                f"at {at}; tensors lie end to end: the file is damaged, fetch it again"
            )
        at, before = end, name
    if at != num_bytes:
        raise FileError(
            f"{where}: its tensors take {at} bytes, but the file has {num_bytes} after "
            "the header; it is truncated or damaged, fetch it again"
        )
