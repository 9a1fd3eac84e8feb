# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The demo model's layers, but for its mixture of experts.

Shapes: B sequences, T tokens each, H hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.config import ModelConfig


class RMSNorm(nn.Module):
    """Root mean square norm in float32, output in `dtype`."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Norms `x` `[..., size]`."""
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * scale * self.weight).to(dtype)


class Linear(nn.Linear):
    """A linear layer without bias that computes in its input's dtype."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` `[..., in_features]` to `[..., out_features]`."""
        return F.linear(x, self.weight.to(x.dtype))


class GatedSiLU(nn.Module):
    """The feed-forward layers' activation."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Both and the result have one shape."""
        return F.silu(gate) * up


def rotary_table(config: ModelConfig) -> Tensor:
    """Cosines and sines of all positions, `[2, positions, qk_rope_head_dim / 2]`."""
    dim = config.qk_rope_head_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    position = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angle = torch.outer(position, config.rope_theta**-exponent)
    return torch.stack([angle.cos(), angle.sin()])


class Rotary(nn.Module):
    """Rotary position embedding of neighbouring pairs (interleaved)."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Rotates `x` `[B, T, heads, rope]` by `table` `[2, T, rope / 2]`."""
        cos, sin = table[:, :, None]
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = [even * cos - odd * sin, odd * cos + even * sin]
        return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; `q`, `k` `[B, heads, T, qk]` and `v` `[B, heads, T, v]`.

    Written out, since at these lengths its backward pass takes half the time of
    torch's fused kernel on a CPU.
    """
    length = q.shape[2]
    mask = q.new_full((length, length), float("-inf")).triu(1)
    scores = torch.baddbmm(
        mask.expand(q.shape[0] * q.shape[1], length, length),
        q.flatten(0, 1),
        k.flatten(0, 1).transpose(1, 2),
        alpha=q.shape[-1] ** -0.5,
    )
    out = torch.bmm(scores.softmax(-1), v.flatten(0, 1))
    return out.unflatten(0, q.shape[:2])


def dropout(x: Tensor, share: float) -> Tensor:
    """Zeroes about `share` of `x`'s elements and scales the rest up.

    One random byte decides one element: several times faster on a CPU than
    torch's, which draws a float for each. The number of elements must be a
    multiple of 8.
    """
    cut = round(share * 256)
    if not cut:
        return x
    words = torch.empty(x.numel() // 8, dtype=torch.int64).random_(-(2**63), None)
    keep = (words.view(torch.uint8) >= cut).view_as(x)
    return x * keep.to(x.dtype).mul_(256 / (256 - cut))


class Attention(nn.Module):
    """Multi-head latent attention, causal and dense."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        heads, eps = config.num_attention_heads, config.rms_norm_eps
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(
            config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim
        )
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps)
        self.kv_b_proj = Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim)
        )
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size)
        self.rotary = Rotary()

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Attends over `x` `[B, T, H]`; `table` is `rotary_table`'s."""
        c = self.config
        heads = (c.num_attention_heads, -1)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x), x.dtype))
        q_nope, q_rope = q.unflatten(-1, heads).split(
            [c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent, x.dtype))
        k_nope, v = kv.unflatten(-1, heads).split(
            [c.qk_nope_head_dim, c.v_head_dim], dim=-1
        )
        k_rope = self.rotary(k_rope.unsqueeze(2), table).expand_as(q_rope)
        q = torch.cat([q_nope, self.rotary(q_rope, table)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out = out.transpose(1, 2).flatten(2)
        return self.o_proj(out)


class DenseMLP(nn.Module):
    """Gated SiLU feed-forward layer."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)
        self.act = GatedSiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` `[..., H]` to the same shape."""
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
