# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs calibration text through the demo model for the encoder.

For every linear layer it sums the second moments of the inputs, for every routed
expert those of its own tokens, and how much each expert's errors matter.

Shapes: N tokens, H hidden, E routed experts of a layer.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from exl3.tools.quantize.hessian import Hessian
from tools.demo_model.data import Data
from tools.demo_model.export import hf_name
from tools.demo_model.layers import Linear
from tools.demo_model.model import DecoderLayer, DemoModel
from tools.demo_model.moe import MoE

SEED = 1615
STEPS = 24
BATCH = 8
WINDOW = 256


@dataclass
class Calibration:
    """What the text says of a model's linear layers, by the checkpoint's names.

    Attributes:
        hessians: By module name, such as `model.layers.1.mlp.experts.3.down_proj`.
        sensitivities: By layer and expert: the squared size of what the expert adds to
            the residual stream, as a share of the stream's own, summed over tokens.
        num_tokens: Tokens that were read.
    """

    hessians: dict[str, Hessian] = field(default_factory=dict)
    sensitivities: dict[tuple[int, int], float] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, name: str, x: Tensor, weights: Tensor | None = None) -> None:
        """Adds the inputs `x` `[N, features]` of one linear layer."""
        if name not in self.hessians:
            self.hessians[name] = Hessian(x.shape[-1])
        self.hessians[name].add(x, weights)


@torch.no_grad()
def calibrate(model: DemoModel, data: Data, steps: int = STEPS) -> Calibration:
    """Reads `steps` batches of training text.

    Attention and the shared layers see every token; the head sees the trunk's and the
    MTP layer's hidden states, since it serves both.
    """
    found = Calibration()
    hooks = []
    for name, module in model.named_modules():
        key = hf_name(model.config, name)
        if isinstance(module, Linear):
            watch = _LinearWatch(found, key)
            hooks.append(module.register_forward_pre_hook(watch.before))
        if isinstance(module, DecoderLayer) and isinstance(module.mlp, MoE):
            experts = _ExpertWatch(found, key)
            hooks.append(module.mlp.register_forward_pre_hook(experts.before))
            hooks.append(module.register_forward_hook(experts.after_layer))
    for step in range(steps):
        model.losses(data.windows(SEED, step, BATCH, WINDOW + 2))
        found.num_tokens += BATCH * WINDOW
    for hook in hooks:
        hook.remove()
    return found


class _LinearWatch:
    """Collects the inputs of a linear layer."""

    def __init__(self, found: Calibration, name: str):
        self.found = found
        self.name = name

    def before(self, _module: Linear, inputs: tuple[Tensor]) -> None:
        """Called with the inputs of the layer."""
        self.found.add(self.name, inputs[0].flatten(0, -2))


class _ExpertWatch:
    """Collects the inputs of one layer's routed experts, and what these add."""

    def __init__(self, found: Calibration, layer: str):
        self.found = found
        self.experts = f"{layer}.mlp.experts"
        self.index = int(layer.rsplit(".", 1)[1])
        self.added = torch.empty(0)  # [E, N]: squared size of what an expert adds

    def before(self, moe: MoE, inputs: tuple[Tensor]) -> None:
        """Called with the inputs of the mixture of experts.

        An expert's rows count by the router's weight, which its output is times.
        """
        tokens = inputs[0].flatten(0, 1)
        weights, chosen = moe.gate(tokens)
        self.added = torch.zeros(len(moe.down), len(tokens))
        for expert, (gate_up, down) in enumerate(zip(moe.gate_up, moe.down)):
            token, slot = torch.where(chosen == expert)
            x, weight = tokens[token], weights[token, slot]
            inner = moe.act(*(x @ gate_up.T).chunk(2, dim=-1))
            for projection in ("gate_proj", "up_proj"):
                self.found.add(f"{self.experts}.{expert}.{projection}", x, weight)
            self.found.add(f"{self.experts}.{expert}.down_proj", inner, weight)
            out = (inner @ down.T) * weight.unsqueeze(-1)
            self.added[expert, token] = out.square().sum(-1)

    def after_layer(self, _layer: DecoderLayer, _inputs: tuple, out: Tensor) -> None:
        """Called with the residual stream behind the layer."""
        stream = out.flatten(0, 1).square().sum(-1)
        shares = (self.added / stream).sum(1)
        for expert, share in enumerate(shares.tolist()):
            key = self.index, expert
            known = self.found.sensitivities.get(key, 0.0)
            self.found.sensitivities[key] = known + share
