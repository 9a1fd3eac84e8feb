# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What calibration leaves of a linear layer's inputs: their second moments."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

#: Rows of the moments that are computed together, as one task.
_BLOCK = 512
Run = Callable[[Callable[[slice], None], Iterable[slice]], Iterable[None]]


class Hessian:
    """Second moments of the inputs X of a linear layer, `X.T @ X`.

    The encoder weighs an error E of the weights by it: the layer's output is off by
    `tr(E.T @ H @ E)` a row, on average over the calibration text.

    Attributes:
        total: Sum over rows, float32 `[k, k]`.
        rows: Number of rows that were summed.
    """

    def __init__(self, features: int):
        self.total = torch.zeros(features, features)
        self.rows = 0

    def add(self, x: Tensor, weights: Tensor | None = None, run: Run = map) -> None:
        """Adds rows; those that hold an infinity or a NaN are left out.

        Args:
            x: Inputs `[rows, k]`.
            weights: What each row's output is multiplied by later, `[rows]`, so that
                rows that matter more also count more.
            run: Computes the blocks of the sum.
        """
        x = x.float() if weights is None else x.float() * weights.float().unsqueeze(-1)
        x = x[x.isfinite().all(-1)]
        self.rows += len(x)

        def block(part: slice) -> None:
            self.total[part] += x[:, part].T @ x

        starts = range(0, len(self.total), _BLOCK)
        for _ in run(block, [slice(start, start + _BLOCK) for start in starts]):
            pass

    def mean(self) -> Tensor | None:
        """Mean over rows, `[k, k]`; None if there was no row to learn from."""
        return self.total / self.rows if self.rows else None
