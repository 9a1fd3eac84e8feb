# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The op of routed experts of the CUDA kernels, run by the host emulator."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.kernels.emulated.build import CSRC, WORDS, Source, library
from tests.kernels.emulated.ops import HERE, ONCE, TYPES, Run, check, in_c, pointer


class _MoeCall(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("x", "topk_ids", "topk_weights", "w13", "w2", "experts", "suh13"),
                *("svh13", "suh2", "svh2", "expert_map", "out"),
            )
        ),
        *((name, ctypes.c_int64) for name in ("w13_bytes", "w2_bytes")),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("type", "wide_ids", "tokens", "width", "top_k", "hidden"),
                *("intermediate", "local_experts", "slices", "routed_experts"),
            )
        ),
        ("limit", ctypes.c_float),
        *(
            (name, ctypes.c_int32)
            for name in ("block_rows", "gate_up_splits", "down_splits")
        ),
    ]


class EmulatedMoe:
    """One build of the kernels, for these numbers of tile words.

    `clamped` is what the last `moe` counted.
    """

    def __init__(
        self,
        words: Sequence[int] = WORDS,
        overlay: Path | None = None,
        optimize: str = "-O2",
        sanitize: bool = False,
    ):
        launch = CSRC / "exl3" / "launch"
        sources = [Source(path) for path in sorted(launch.glob("moe*.cu"))]
        sources.append(Source(HERE / "moe_api.cpp"))
        each = " ".join(f"apply({number})" for number in words)
        defines = [f"EXL3_FOR_EACH_WORDS(apply)={each}"]
        path = library("moe", sources, defines, overlay, optimize, sanitize)
        self._library = ctypes.CDLL(str(path))
        self._library.emulated_moe.restype = ctypes.c_char_p

    def __call__(
        self,
        x: np.ndarray,
        topk_ids: np.ndarray,
        topk_weights: np.ndarray,
        w13: np.ndarray,
        w2: np.ndarray,
        experts: np.ndarray,
        suh13: np.ndarray,
        svh13: np.ndarray,
        suh2: np.ndarray,
        svh2: np.ndarray,
        slices: int = 1,
        expert_map: np.ndarray | None = None,
        limit: float = float("inf"),
        *,
        dtype: str = "float32",
        block_rows: int = 16,
        splits: tuple[int, int] = (1, 1),
        run: Run = ONCE,
    ) -> np.ndarray:
        """`moe` of exl3.ops, with activation silu."""
        code, element = TYPES[dtype]
        assert x.dtype == element and experts.dtype == np.int64
        local = len(experts) // slices
        routed = local if expert_map is None else len(expert_map)
        out = np.full_like(x, 0xFF)
        tensors = (
            x,
            topk_ids,
            topk_weights,
            w13,
            w2,
            experts,
            suh13,
            svh13,
            suh2,
            svh2,
        )
        call = _MoeCall(
            *(pointer(a) for a in (*tensors, expert_map, out)),
            *(w13.nbytes, w2.nbytes, code, topk_ids.dtype == np.int64, *x.shape),
            *(topk_ids.shape[1], suh13.shape[-1], suh2.shape[-1]),
            *(local, slices, routed, limit, block_rows, *splits),
        )
        record = in_c(run)
        check(self._library.emulated_moe(ctypes.byref(call), ctypes.byref(record)))
        self.clamped = record.clamped
        return out
