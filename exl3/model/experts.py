# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The routed experts of one layer."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], None]


class RoutedExperts(nn.Module):
    """Runs every token through the experts that its router chose.

    It stands in place of a transformers model's own experts, and computes the same.
    N tokens, H hidden, I intermediate of an expert.

    Attributes:
        gate_proj, up_proj, down_proj: The weights of each expert, `[I, H]` twice and
            `[H, I]`: float32 if decoded from EXL3, or else as stored; they are
            computed with in float32.
        observer: Called for every expert that got tokens, if it is not None:

                observer(expert, tokens, x, weight, inner, out)

            with the expert's index, the rows `[n]` of its tokens, its input `[n, H]`,
            the router's weight `[n]`, the input of `down_proj` `[n, I]`, and its
            output `[n, H]` before the router's weight.
    """

    def __init__(
        self,
        gate_proj: Sequence[Tensor],
        up_proj: Sequence[Tensor],
        down_proj: Sequence[Tensor],
        activation: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        self.gate_proj = _frozen(gate_proj)
        self.up_proj = _frozen(up_proj)
        self.down_proj = _frozen(down_proj)
        self.activation = activation
        self.observer: Observer | None = None

    def __len__(self) -> int:
        return len(self.down_proj)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs.

        Args:
            hidden: `[N, H]`.
            chosen: Experts of each token `[N, top_k]`.
            weights: The router's weight of each `[N, top_k]`.
        """
        total = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            tokens, slot = torch.where(chosen == expert)
            x, weight = hidden[tokens], weights[tokens, slot]
            gate = F.linear(x, self.gate_proj[expert].float())
            inner = self.activation(gate) * F.linear(x, self.up_proj[expert].float())
            out = F.linear(inner, self.down_proj[expert].float())
            if self.observer is not None:
                self.observer(expert, tokens, x, weight, inner, out)
            total.index_add_(0, tokens, out * weight.unsqueeze(-1))
        return total


def _frozen(weights: Sequence[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(
        nn.Parameter(weight, requires_grad=False) for weight in weights
    )
