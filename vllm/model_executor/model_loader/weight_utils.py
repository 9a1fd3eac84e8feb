# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Extends upstream's making of quantization configs: EXL3's has a plan."""

from pathlib import Path

from exl3.checkpoint.plan import CheckpointPlan
from exl3.format.errors import UnsupportedFormatError
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.fork import extend
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.exl3.config import Exl3Config
from vllm.model_executor.model_loader import weight_utils_upstream as upstream
from vllm.transformers_utils.checkpoint import read_folder
from vllm.transformers_utils.exl3 import checkpoint_plan


def get_quant_config(
    model_config: ModelConfig, load_config: LoadConfig
) -> QuantizationConfig:
    """Upstream's `get_quant_config`; a config of EXL3 knows its checkpoint's plan.

    Raises:
        CheckpointError: The checkpoint is not EXL3, or contradicts itself.
    """
    config = _upstream_get_quant_config(model_config, load_config)
    if not isinstance(config, Exl3Config):
        return config
    source = model_config.model, model_config.revision
    plan = checkpoint_plan(*source)
    if plan is None:
        plan = _fetch(model_config, load_config)
    if not plan.is_exl3:
        raise UnsupportedFormatError(
            f"{model_config.model}: is to be served as EXL3 and holds no EXL3 tensors; "
            "leave out --quantization, or fetch the safetensors files to a folder"
        )
    return Exl3Config(plan, source)


def _fetch(model_config: ModelConfig, load_config: LoadConfig) -> CheckpointPlan:
    """Fetches a checkpoint from the hub, to where it will be loaded from."""
    folder = ""
    for pattern in ("*.json", "*.safetensors"):
        folder = upstream.download_weights_from_hf(
            model_config.model,
            load_config.download_dir,
            [pattern],
            model_config.revision,
            ignore_patterns=load_config.ignore_patterns,
        )
    return read_folder(Path(folder)).plan


_upstream_get_quant_config = upstream.get_quant_config
extend(__name__, upstream)
