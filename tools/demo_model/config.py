# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The sizes of the demo model."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. Names are those of `config.json`.

    Attributes:
        widths: Routed experts of each layer by global layer index, the MTP layer
            last; 0 is a dense layer.
    """

    vocab_size: int = 1024
    hidden_size: int = 256
    num_hidden_layers: int = 6
    intermediate_size: int = 512
    moe_intermediate_size: int = 256
    widths: tuple[int, ...] = (0, 8, 8, 8, 8, 8, 8)
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.5
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    # transformers fixes the latent norms' epsilon to this value and vLLM takes
    # it from the config, so no other value gives both the same model.
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    @property
    def qk_head_dim(self) -> int:
        """Size of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def with_widths(self, widths: tuple[int, ...]) -> "ModelConfig":
        """The same model with other numbers of routed experts."""
        return replace(self, widths=tuple(widths))
