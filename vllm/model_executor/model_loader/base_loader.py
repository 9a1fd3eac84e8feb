# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Extends upstream's model loaders, all of them, to EXL3 checkpoints."""

import copy

from torch import nn

from vllm.config import ModelConfig, VllmConfig
from vllm.fork import extend
from vllm.model_executor.layers.quantization.exl3.config import Exl3Config
from vllm.model_executor.model_loader import base_loader_upstream as upstream
from vllm.refusal import leaving_refusals
from vllm.transformers_utils.exl3 import QUANT_METHOD


class BaseModelLoader(upstream.BaseModelLoader):
    """Upstream's, which gives a draft the quantization of its own checkpoint."""

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """Loads a model; a refusal reaches the server from the process it is in."""
        with leaving_refusals():
            return super().load_model(vllm_config, model_config, prefix)

    def create_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """Creates a model whose `load_weights` takes EXL3 tensors, if it has any."""
        # Imported late: it imports layers, which import the loaders.
        from vllm.model_executor.layers.quantization.exl3.loading import (
            load_exl3_tensors,
        )
        from vllm.model_executor.layers.quantization.exl3.workspaces import (
            reserve_workspaces,
        )

        vllm_config = _with_own_quantization(vllm_config, model_config)
        model = super().create_model(vllm_config, model_config, prefix)
        if isinstance(vllm_config.quant_config, Exl3Config):
            draft = model_config is not vllm_config.model_config
            load_exl3_tensors(model, vllm_config.quant_config, draft)
            reserve_workspaces(model, vllm_config, draft)
        return model


def _with_own_quantization(
    vllm_config: VllmConfig, model_config: ModelConfig
) -> VllmConfig:
    """The engine's config with the quantization of the model that is created.

    A draft is created from the target's, and its checkpoint may be another one. Even
    where it is the same one, each model names its modules in its own way.
    """
    target = vllm_config.model_config
    if model_config is target or QUANT_METHOD not in (
        model_config.quantization,
        target.quantization,
    ):
        return vllm_config
    own = copy.copy(vllm_config)
    of_target = vllm_config.quant_config
    source = model_config.model, model_config.revision
    if isinstance(of_target, Exl3Config) and of_target.source == source:
        own.quant_config = Exl3Config(of_target.plan, source)
    else:
        own.quant_config = VllmConfig.get_quantization_config(
            model_config, vllm_config.load_config
        )
    return own


extend(__name__, upstream)
