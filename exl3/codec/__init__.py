# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The format's arithmetic, in torch: how tensors decode, and how weights encode."""

from exl3.codec.decode import decode_weight, expand_signs, inner_matrix
from exl3.codec.encode import QuantizedLinear, quantize_linear

__all__ = [
    "QuantizedLinear",
    "decode_weight",
    "expand_signs",
    "inner_matrix",
    "quantize_linear",
]
