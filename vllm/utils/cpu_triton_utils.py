# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What stands for Triton kernels on the CPU.

See docs/upstream/cpu-sampling-with-drafts.md.
"""

import torch

from vllm.fork import extend
from vllm.utils import cpu_triton_utils_upstream as upstream


def _expand_kernel_impl(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeats a request's value for each of its tokens, in the values' own type.

    Args:
        output: Filled with the values, `[num_tokens]`.
        input_val: One value a request, such as its temperature, `[batch_size]`.
        cu_num_tokens: Tokens of the requests so far, `[batch_size]` int.
        replace_from: A value to replace.
        replace_to: What to replace it by.
        MAX_NUM_TOKENS: The Triton kernel's bound, by its name; not needed here.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts))


extend(__name__, upstream)
