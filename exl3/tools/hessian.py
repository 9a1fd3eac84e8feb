# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What calibration leaves of a linear layer's inputs: their second moments."""

import torch
from torch import Tensor


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

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Adds rows; those that hold an infinity or a NaN are left out.

        Args:
            x: Inputs `[rows, k]`.
            weights: What each row's output is multiplied by later, `[rows]`, so that
                rows that matter more also count more.
        """
        x = x.float() if weights is None else x.float() * weights.float().unsqueeze(-1)
        x = x[x.isfinite().all(-1)]
        self.total += x.T @ x
        self.rows += len(x)

    def mean(self) -> Tensor | None:
        """Mean over rows, `[k, k]`; None if there was no row to learn from."""
        return self.total / self.rows if self.rows else None
