# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A compiled router reads its logits after they are written."""

import torch

from vllm import _custom_ops as ops

HIDDEN, EXPERTS, LAYERS = 256, 8, 2


class Routers(torch.nn.Module):
    """MoE layers whose routers share a bias, as Inductor likes to fuse them."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        gate = torch.randn(EXPERTS, HIDDEN, generator=generator)
        self.gate = ops.create_onednn_mm(gate.T, 32)
        self.bias = torch.randn(EXPERTS, generator=generator)
        self.expert = torch.randn(HIDDEN, HIDDEN, generator=generator) / 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            y = torch.nn.functional.rms_norm(x, (HIDDEN,))
            scores = ops.onednn_mm(self.gate, y, None).sigmoid()
            chosen = (scores + self.bias).topk(2, -1)[1]
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
            x = x + (y @ self.expert) * (weights * (1 + chosen)).sum(-1, keepdim=True)
        return x


def test_a_compiled_router_gives_what_it_gives_eagerly():
    routers = Routers()
    compiled = torch.compile(routers, dynamic=True)
    with torch.no_grad():
        for tokens in (9, 1, 33):
            x = torch.randn(tokens, HIDDEN)
            # Unwritten memory is most often zeros or an earlier result; a few runs
            # with new inputs cannot all be right by chance.
            torch.testing.assert_close(compiled(x), routers(x), rtol=1e-4, atol=1e-4)
