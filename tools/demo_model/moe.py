# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The demo model's mixture of experts.

Shapes: N tokens, H hidden, E routed experts of the layer (its width), I expert
intermediate.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.config import ModelConfig
from tools.demo_model.layers import DenseMLP, GatedSiLU

# Experts compute whole blocks of this many tokens: every new number of rows costs
# oneDNN the making of a kernel, which took most of a step.
SLOT_BLOCK = 64


class Router(nn.Module):
    """Sigmoid router with a selection bias that no gradient reaches.

    The bias balances the experts' loads without an auxiliary loss: it chooses
    the experts and does not weigh them.
    """

    def __init__(self, config: ModelConfig, width: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(width, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(width))
        self.register_buffer("load", torch.zeros(width), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts for `x` `[N, H]`: weights and ids, `[N, top k]` each."""
        scores = torch.sigmoid(F.linear(x.float(), self.weight))
        choice = scores.detach() + self.e_score_correction_bias
        experts = choice.topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.training:
            self.load += torch.bincount(experts.flatten(), minlength=len(self.load))
        return weights * self.config.routed_scaling_factor, experts

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Moves the bias by `rate` against the loads since the last call."""
        if rate:
            error = self.load.mean() - self.load
            self.e_score_correction_bias += rate * error.sign()
        self.load.zero_()


class MoE(nn.Module):
    """Routed experts and one shared expert.

    `gate_up` is `[E, 2 * I, H]` and `down` `[E, H, I]`.
    """

    def __init__(self, config: ModelConfig, width: int):
        super().__init__()
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config, width)
        self.gate_up = nn.Parameter(torch.empty(width, 2 * inter, hidden))
        self.down = nn.Parameter(torch.empty(width, hidden, inter))
        self.shared_experts = DenseMLP(hidden, inter)
        self.act = GatedSiLU()

    def expert(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """One expert's output `[n, H]` for its tokens `x` `[n, H]`."""
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(self.act(gate, up), down)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` `[B, T, H]` to the same shape."""
        tokens = x.flatten(0, 1)
        weights, experts = self.gate(tokens)
        # Sorted by expert, every expert sees one contiguous slice of slots.
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=len(self.down))
        sizes = (counts + SLOT_BLOCK - 1) // SLOT_BLOCK * SLOT_BLOCK
        gaps = (sizes - counts).cumsum(0).roll(1)
        gaps[0] = 0
        slots = torch.arange(len(order)) + gaps.repeat_interleave(counts)
        # Slots without a token compute token 0 and nobody reads them.
        source = slots.new_zeros(int(sizes.sum()))
        source[slots] = order // experts.shape[1]
        out = torch.cat(
            [
                self.expert(*expert_and_weights)
                for expert_and_weights in zip(
                    tokens[source].split(sizes.tolist()),
                    self.gate_up.to(x.dtype).unbind(),
                    self.down.to(x.dtype).unbind(),
                )
            ]
        )
        out = out[slots[order.argsort()]].unflatten(0, experts.shape)
        routed = (out * weights.to(x.dtype).unsqueeze(-1)).sum(1)
        return routed.view_as(x) + self.shared_experts(x)
