# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""exllamav3's linear layer, where that package is installed."""

import importlib
from typing import Any

import torch

from benchmarks.device.layers import Matrix
from benchmarks.device.timing import seconds_per_call


class Peer:
    """Runs matrices by exllamav3's own layer class, which chooses its kernels."""

    def __init__(self, layer_class: Any):
        self._layer_class = layer_class

    def seconds(self, x: torch.Tensor, copies: list[Matrix]) -> float:
        """Time of one call.

        Args:
            x: float16 [rows, k].
            copies: The same product's matrices, in turn.
        """
        layers = [self._layer(matrix, x.device) for matrix in copies]
        return seconds_per_call([lambda one=one: one.forward(x, {}) for one in layers])

    def _layer(self, matrix: Matrix, device: torch.device) -> Any:
        marker = torch.zeros(1, dtype=torch.int32, device=device)
        return self._layer_class(
            None,
            matrix.k,
            matrix.n,
            suh=matrix.suh[0],
            svh=matrix.svh,
            trellis=matrix.stored().to(device),
            mcg=marker if matrix.codebook == 1 else None,
            mul1=marker if matrix.codebook == 2 else None,
            out_dtype=torch.float16,
        )


def find() -> tuple[Peer | None, str]:
    """The peer, or None and why there is none."""
    try:
        module = importlib.import_module("exllamav3.modules.quant.exl3")
        return Peer(module.LinearEXL3), ""
    except Exception as error:  # whatever its import raises
        return None, f"not usable here ({type(error).__name__}: {error})"
