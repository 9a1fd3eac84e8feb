# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The demo model as a compact torch module: GLM-MoE-DSA with an MTP layer.

Written for training on a CPU: linear algebra in `compute_dtype`, the residual
stream, norms, router and losses in float32. Sparse attention is left out, since
within `index_topk` tokens it is dense attention; the indexer's weights are made
at export.

Shapes: B sequences, T tokens each, H hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.config import ModelConfig
from tools.demo_model.layers import (
    Attention,
    DenseMLP,
    GatedSiLU,
    Linear,
    RMSNorm,
    Rotary,
    dropout,
    rotary_table,
)
from tools.demo_model.moe import MoE, Router


class DecoderLayer(nn.Module):
    """Attention and a dense (`width` 0) or mixture-of-experts layer."""

    def __init__(self, config: ModelConfig, width: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp: nn.Module = (
            MoE(config, width) if width else DenseMLP(hidden, config.intermediate_size)
        )

    def forward(
        self, x: Tensor, table: Tensor, dtype: torch.dtype, drop: float
    ) -> Tensor:
        """Maps the float32 residual stream `x` `[B, T, H]` to the next layer's."""
        x = x + dropout(self.self_attn(self.input_layernorm(x, dtype), table), drop)
        return x + dropout(self.mlp(self.post_attention_layernorm(x, dtype)), drop)


class MTPLayer(DecoderLayer):
    """Predicts the token after the next one (multi-token prediction).

    It shares the trunk's embedding and head. At position p it reads the trunk's
    normed hidden state of p and the embedding of token p + 1, and predicts token
    p + 2. As vLLM does, the embedding at position 0 is masked.
    """

    def __init__(self, config: ModelConfig, width: int):
        super().__init__(config, width)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, eps)})

    def draft(
        self,
        hidden: Tensor,
        next_embeds: Tensor,
        table: Tensor,
        dtype: torch.dtype,
        drop: float,
    ) -> Tensor:
        """Hidden states for the shared head.

        Args:
            hidden: The trunk's hidden states after its final norm `[B, T, H]`.
            next_embeds: Embeddings of the tokens one later `[B, T, H]`.
            table: `rotary_table`'s.
            dtype: The dtype of the linear algebra.
            drop: Share of the residual branches' outputs that is dropped.

        Returns:
            Normed hidden states `[B, T, H]` in `dtype`.
        """
        next_embeds = torch.cat(
            [torch.zeros_like(next_embeds[:, :1]), next_embeds[:, 1:]], dim=1
        )
        x = torch.cat([self.enorm(next_embeds, dtype), self.hnorm(hidden, dtype)], -1)
        x = self(self.eh_proj(x).float(), table, dtype, drop)
        return self.shared_head["norm"](x, dtype)


class DemoModel(nn.Module):
    """The trunk, its head and the MTP layer."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.drop = 0.0
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        trunk, mtp = config.widths[:-1], config.widths[-1]
        self.layers = nn.ModuleList(DecoderLayer(config, width) for width in trunk)
        self.mtp = MTPLayer(config, mtp)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.register_buffer("table", rotary_table(config), persistent=False)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Normal weights; those that write the residual stream are smaller."""
        std = self.config.initializer_range
        depth_std = std / (2 * len(self.layers)) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                writes_residual = "o_proj" in name or "down" in name
                weight.normal_(0.0, depth_std if writes_residual else std)

    def compile_pieces(self) -> None:
        """Compiles the elementwise modules, for a fifth less time a step."""
        for module in self.modules():
            if isinstance(module, (RMSNorm, GatedSiLU, Rotary)):
                module.compile(dynamic=True)

    def routers(self) -> list[Router]:
        """The routers of all mixture-of-experts layers, the MTP layer's last."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def trunk(self, tokens: Tensor) -> Tensor:
        """Hidden states after the final norm `[B, T, H]` of `tokens` `[B, T]`."""
        x = dropout(self.embed_tokens(tokens), self.drop)
        table = self.table[:, : tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, table, self.compute_dtype, self.drop)
        return self.norm(x, self.compute_dtype)

    def draft(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        """The MTP layer's hidden states for the shared head `[B, T, H]`.

        Args:
            hidden: `trunk`'s output `[B, T, H]`.
            next_tokens: The token after each position `[B, T]`.
        """
        embeds = self.embed_tokens(next_tokens)
        table = self.table[:, : next_tokens.shape[1]]
        return self.mtp.draft(hidden, embeds, table, self.compute_dtype, self.drop)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[B, T, vocab]`."""
        return self.lm_head(hidden).float()

    def losses(self, window: Tensor) -> tuple[Tensor, Tensor]:
        """Mean next-token losses of the trunk and of the MTP layer, in nats.

        Args:
            window: Token ids `[B, T + 2]`: both losses have T targets.
        """
        hidden = self.trunk(window[:, :-2])
        main = self.logits(hidden).flatten(0, 1)
        draft = self.logits(self.draft(hidden, window[:, 1:-1])).flatten(0, 1)
        return (
            F.cross_entropy(main, window[:, 1:-1].flatten()),
            F.cross_entropy(draft, window[:, 2:].flatten()),
        )
