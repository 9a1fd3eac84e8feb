# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Rotary embeddings on the CPU, for queries and keys of any layout.

See docs/upstream/cpu-rotary-strides.md.
"""

import torch

from vllm import _custom_ops as ops
from vllm.fork import extend
from vllm.model_executor.layers.rotary_embedding import base_upstream as upstream


class RotaryEmbedding(upstream.RotaryEmbedding):
    """Upstream's, with a CPU op that sees each token as one row."""

    def forward_cpu(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotates `query` and `key` by the op, whatever their layout.

        Args:
            positions: `[num_tokens]` or `[batch, length]` int64.
            query: The tokens in the order of `positions`, each with its heads:
                `[num_tokens, heads * head_size]`, `[num_tokens, heads, head_size]`
                or either with a batch in front; gaps in memory are allowed.
            key: The same with its own number of heads, or None.

        Returns:
            The rotated query and key in the shapes given. They share memory with
            the arguments only where those need no copy.
        """
        num_tokens = positions.numel()
        query_rows = _token_rows(query, num_tokens)
        key_rows = None if key is None else _token_rows(key, num_tokens)
        ops.rotary_embedding(
            positions,
            query_rows,
            key_rows,
            self.head_size,
            self._match_cos_sin_cache_dtype(query),
            self.is_neox_style,
        )
        return (
            query_rows.view(query.shape),
            None if key is None or key_rows is None else key_rows.view(key.shape),
        )


def _token_rows(x: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns `x` as `[num_tokens, features]` with dense rows; a view if it can be.

    The op steps from token to token by the stride of the last dimension but one, and
    takes all the heads of a token to lie behind one another.
    """
    rows = x.reshape(num_tokens, -1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


extend(__name__, upstream)
