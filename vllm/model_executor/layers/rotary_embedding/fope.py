# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Fourier position embeddings on the CPU.

See docs/upstream/cpu-rotary-strides.md.
"""

import torch

from vllm.fork import extend
from vllm.model_executor.layers.rotary_embedding import fope_upstream as upstream


class FourierRotaryEmbedding(upstream.FourierRotaryEmbedding):
    """Upstream's, by its own arithmetic on the CPU too.

    Its table holds a learned mixture for each head, which the inherited op for plain
    rotary embeddings would misread.
    """

    def forward_cpu(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `forward_native`."""
        return self.forward_native(positions, query, key)


extend(__name__, upstream)
