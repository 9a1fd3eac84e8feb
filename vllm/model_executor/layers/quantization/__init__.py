# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Extends upstream's quantization methods by EXL3."""

from vllm.fork import extend
from vllm.model_executor.layers.quantization import init_upstream as upstream
from vllm.model_executor.layers.quantization.exl3.config import Exl3Config
from vllm.transformers_utils.exl3 import QUANT_METHOD

upstream.register_quantization_config(QUANT_METHOD)(Exl3Config)

extend(__name__, upstream)
