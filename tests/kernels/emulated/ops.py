# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The ops of the CUDA kernels, run by the host emulator, on numpy arrays."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.kernels.emulated.build import BLOCK_ROWS, CSRC, WORDS, Source, library

HERE = Path(__file__).parent
TYPES = {
    "float32": (0, np.float32),
    "bfloat16": (1, np.uint16),
    "float16": (2, np.float16),
}


class EmulatorFault(RuntimeError):
    """The emulator stopped a launch; the message begins with the fault's name."""


@dataclass(frozen=True)
class Run:
    """How the emulator runs an op: the order of threads, how often, what it counts."""

    schedule: int = 0
    launches: int = 1
    resident_blocks: int = 8
    count_banks: bool = False


ONCE = Run()


@dataclass(frozen=True)
class Shard:
    """One matrix of a fused linear, as the op describes it."""

    n: int
    skip: int
    keep: int
    words: int
    codebook: int


class _Run(ctypes.Structure):
    _fields_ = [
        ("schedule", ctypes.c_uint32),
        ("launches", ctypes.c_int32),
        ("resident_blocks", ctypes.c_int32),
        ("count_banks", ctypes.c_int32),
        ("clamped", ctypes.c_uint64),
    ]


class _LinearCall(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "trellis", "suh", "svh", "bias", "out")
        ),
        ("trellis_bytes", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("type", "rows", "width", "k", "num_shards")
        ),
        ("shards", ctypes.c_void_p),
        ("block_rows", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("unrounded", ctypes.c_int32),
    ]


class _DequantizeCall(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("trellis", "suh", "svh", "out")),
        *((name, ctypes.c_int32) for name in ("k", "n", "words", "codebook")),
    ]


class _TransformCall(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "pre", "post", "out")),
        *(
            (name, ctypes.c_int32)
            for name in ("x_type", "out_type", "rows", "width", "k")
        ),
        ("num_slabs", ctypes.c_int32),
    ]


class EmulatedOps:
    """One build of the kernels, for these numbers of tile words and rows of a block.

    `clamped` is what the last `linear` counted.
    """

    def __init__(
        self,
        words: Sequence[int] = WORDS,
        block_rows: Sequence[int] = BLOCK_ROWS,
        overlay: Path | None = None,
        optimize: str = "-O2",
        sanitize: bool = False,
    ):
        launch = CSRC / "exl3" / "launch"
        sources = [Source(launch / "gemm.cu", (f"EXL3_WORDS={w}",)) for w in words]
        sources += [
            Source(launch / "dequantize.cu", (f"EXL3_WORDS={w}",)) for w in words
        ]
        sources += [
            Source(launch / f"{name}.cu")
            for name in ("dispatch", "linear", "plan", "transform")
        ]
        sources.append(Source(HERE / "linear_api.cpp"))
        defines = [
            f"EXL3_FOR_EACH_{name}(apply)=" + " ".join(f"apply({v})" for v in values)
            for name, values in (("WORDS", words), ("BLOCK_ROWS", block_rows))
        ]
        path = library("ops", sources, defines, overlay, optimize, sanitize)
        self._library = ctypes.CDLL(str(path))
        for name in ("linear", "dequantize", "transform", "banks"):
            getattr(self._library, f"emulated_{name}").restype = ctypes.c_char_p

    def linear(
        self,
        x: np.ndarray,
        trellis: np.ndarray,
        suh: np.ndarray,
        svh: np.ndarray,
        bias: np.ndarray | None,
        shards: Sequence[Shard],
        *,
        dtype: str = "float32",
        block_rows: int = 16,
        splits: int = 1,
        unrounded: bool = False,
        run: Run = ONCE,
    ) -> np.ndarray:
        """`linear` of exl3.ops; x and the result are bit patterns for bfloat16."""
        code, element = TYPES[dtype]
        rows, width = x.shape
        columns = sum(shard.keep for shard in shards)
        # Old results must not pass for new ones.
        out = np.full((rows, columns), 0xFF, element)
        table = np.array(
            [[s.n, s.skip, s.keep, s.words, s.codebook] for s in shards], np.int32
        )
        assert x.dtype == element and trellis.dtype == np.int16
        call = _LinearCall(
            *(pointer(a) for a in (x, trellis, suh, svh, bias, out)),
            trellis.nbytes,
            *(code, rows, width, suh.shape[-1], len(shards)),
            pointer(table),
            block_rows,
            splits,
            unrounded,
        )
        record = in_c(run)
        check(self._library.emulated_linear(ctypes.byref(call), ctypes.byref(record)))
        self.clamped = record.clamped
        return out

    def dequantize(
        self,
        trellis: np.ndarray,
        suh: np.ndarray | None,
        svh: np.ndarray | None,
        codebook: int,
        run: Run = ONCE,
    ) -> np.ndarray:
        """`dequant` of exl3.ops, of a trellis [n/16, k/16, words]."""
        strips, depth, words = trellis.shape
        out = np.full((16 * depth, 16 * strips), 0xFF, np.float32)
        call = _DequantizeCall(
            *(pointer(a) for a in (trellis, suh, svh, out)),
            *(16 * depth, 16 * strips, words, codebook),
        )
        check(
            self._library.emulated_dequantize(
                ctypes.byref(call), ctypes.byref(in_c(run))
            )
        )
        return out

    def hadamard(
        self,
        x: np.ndarray,
        pre: np.ndarray | None,
        post: np.ndarray | None,
        dtype: str = "float32",
        run: Run = ONCE,
    ) -> np.ndarray:
        """`hadamard` of exl3.ops, of x [rows, k]."""
        code, element = TYPES[dtype]
        assert x.dtype == element
        out = np.full_like(x, 0xFF)
        call = _TransformCall(
            *(pointer(a) for a in (x, pre, post, out)),
            *(code, code, *x.shape, x.shape[1], 1),
        )
        check(
            self._library.emulated_transform(
                ctypes.byref(call), ctypes.byref(in_c(run))
            )
        )
        return out

    def banks(self) -> str:
        """Shared-memory wavefronts and conflicts of the last counted run, by place."""
        return self._library.emulated_banks().decode()


def check(fault: bytes | None) -> None:
    """Raises what an emulated op returned, if it is a fault."""
    if fault is not None:
        raise EmulatorFault(fault.decode())


def in_c(run: Run) -> _Run:
    """The run as the C functions take it."""
    return _Run(run.schedule, run.launches, run.resident_blocks, run.count_banks, 0)


def pointer(array: np.ndarray | None) -> int | None:
    """The address of an array's data."""
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data
