# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""One EXL3 matrix: what its tensors must look like, and what they say."""

from collections.abc import Mapping
from dataclasses import dataclass

from exl3.checkpoint.file_header import TensorHeader
from exl3.format.constants import (
    HADAMARD,
    HALF_RATE_WORDS,
    TILE,
    Codebook,
    bits_of,
    is_legal_rate,
)
from exl3.format.errors import TensorError, UnsupportedFormatError
from exl3.format.names import EXL3_FIELDS


@dataclass(frozen=True, slots=True)
class Matrix:
    """The stored size and code of one trellis matrix."""

    in_features: int  # k as stored, a multiple of 128
    out_features: int  # n as stored, a multiple of 128
    words: int  # int16 words of a tile
    codebook: Codebook
    has_bias: bool = False

    @property
    def bits(self) -> int | float:
        """Bits per weight."""
        return bits_of(self.words)


class MatrixReader:
    """Reads matrices, and remembers what it saw: a million tensors have few shapes."""

    def __init__(self) -> None:
        self._known: dict[object, Matrix] = {}

    def read(
        self,
        module: str,
        fields: Mapping[str, TensorHeader],
        shared: frozenset[str] = frozenset(),
    ) -> Matrix:
        """See `read_matrix`."""
        key = shared, *[(name, at.dtype, at.shape) for name, at in fields.items()]
        matrix = self._known.get(key)
        if matrix is None:
            matrix = self._known[key] = read_matrix(module, fields, shared)
        return matrix


def is_exl3(fields: Mapping[str, TensorHeader]) -> bool:
    """Whether a module has any tensor that only EXL3 modules have."""
    return "trellis" in fields or not EXL3_FIELDS.isdisjoint(fields)


def read_matrix(
    module: str,
    fields: Mapping[str, TensorHeader],
    shared: frozenset[str] = frozenset(),
) -> Matrix:
    """Checks the tensors of one EXL3 matrix.

    Args:
        module: The module's name, with its rank if it is a slice.
        fields: Its tensors, by the last part of their names.
        shared: Fields that all experts of a layer share, and so are not among these.

    Raises:
        TensorError: A tensor is missing or misshaped.
        UnsupportedFormatError: The module is in another format.
    """
    if "signs" in fields:
        raise UnsupportedFormatError(
            f"{module}: a quantized embedding table (trellis with signs), which is not "
            "supported; convert the checkpoint with the embeddings left in 16 bits"
        )
    if "scale" in fields:
        raise UnsupportedFormatError(
            f"{module}.scale: EXL3 has no such tensor since its first release; convert "
            "the model again"
        )
    trellis = fields.get("trellis")
    if trellis is None:
        other = next(fields[field] for field in fields if field in EXL3_FIELDS)
        raise TensorError(
            f"{module}: {other.name} is stored in {other.file}, but no trellis; fetch "
            "the missing file, or convert the module again"
        )
    shape = trellis.shape
    if trellis.dtype != "I16" or len(shape) != 3:
        raise TensorError(
            f"{trellis.file}: {trellis.name} is {trellis.dtype} of shape "
            f"{list(shape)}; expected I16 of shape [k/{TILE}, n/{TILE}, {TILE} * bits]"
        )
    rows, columns, words = shape[0] * TILE, shape[1] * TILE, shape[2]
    for what, features in (("in-features", rows), ("out-features", columns)):
        if features == 0 or features % HADAMARD:
            raise TensorError(
                f"{trellis.file}: {trellis.name} has {features} {what}; expected a "
                f"multiple of {HADAMARD}: pad the matrix before it is encoded"
            )
    codebook = _codebook(module, fields)
    if not is_legal_rate(words, codebook):
        half = " (only mul1 has half rates)" if words in HALF_RATE_WORDS else ""
        raise TensorError(
            f"{trellis.file}: {trellis.name} has tiles of {words} words, "
            f"{bits_of(words)} bits per weight, which {codebook.label} does not "
            f"have{half}; encode it at 1 to 8 bits"
        )
    _check_scales(module, fields, "suh", "su", rows, shared)
    _check_scales(module, fields, "svh", "sv", columns, shared)
    bias = fields.get("bias")
    if bias is not None:
        _expect(bias, ("F16", "F32", "BF16"), (columns,))
    return Matrix(rows, columns, words, codebook, bias is not None)


def _codebook(module: str, fields: Mapping[str, TensorHeader]) -> Codebook:
    mcg, mul1 = fields.get("mcg"), fields.get("mul1")
    if mcg is not None and mul1 is not None:
        raise TensorError(
            f"{module}: both {mcg.name} in {mcg.file} and {mul1.name} in {mul1.file} "
            "are stored, so the codebook is not clear; remove the wrong marker"
        )
    marker = mcg or mul1
    if marker is None:
        return Codebook.INST3
    if marker.dtype not in ("I32", "U32") or marker.shape not in ((), (1,)):
        raise TensorError(
            f"{marker.file}: {marker.name} is {marker.dtype} of shape "
            f"{list(marker.shape)}; expected one I32"
        )
    return Codebook.MCG if mcg is not None else Codebook.MUL1


def _check_scales(
    module: str,
    fields: Mapping[str, TensorHeader],
    scales: str,
    signs: str,
    features: int,
    shared: frozenset[str],
) -> None:
    """Checks the vector of one side, or the packed signs in its place."""
    vector, packed = fields.get(scales), fields.get(signs)
    if scales in shared:
        own = vector or packed
        if own is not None:
            raise TensorError(
                f"{own.file}: {own.name} is stored beside {scales} of shared_h, which "
                "takes its place in shared_h_v1; remove one of them"
            )
        return
    if vector is not None and packed is not None:
        raise TensorError(
            f"{module}: both {vector.name} in {vector.file} and {packed.name} in "
            f"{packed.file} are stored; remove the wrong one"
        )
    if vector is not None:
        _expect(vector, ("F16",), (features,))
    elif packed is not None:
        _expect(packed, ("I16",), (features // TILE,))
    else:
        raise TensorError(
            f"{module}: the trellis is stored, but neither {scales} nor {signs}; fetch "
            "the missing file, or convert the module again"
        )


def _expect(
    header: TensorHeader, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    if header.dtype not in dtypes or header.shape != shape:
        raise TensorError(
            f"{header.file}: {header.name} is {header.dtype} of shape "
            f"{list(header.shape)}; expected {' or '.join(dtypes)} of shape "
            f"{list(shape)}, as its trellis has it"
        )
