# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""DeepSeek sparse attention (DSA) as dense attention, where no sparse kernel exists.

A sparse layer attends to the `index_topk` earlier tokens that its indexer ranks
first. While a context holds no more tokens than that, it attends to all of them, so
the layer is exactly a dense one, and its indexer changes nothing.

See docs/upstream/cpu-dsa-as-dense.md.
"""

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from transformers import DeepseekV3Config, PreTrainedConfig

from vllm.config import ModelConfig
from vllm.refusal import RefusedOptionError

# The architectures that deepseek_v2.py and deepseek_mtp.py build, densely where the
# config has no `index_topk`.
_DSA_ARCHITECTURES = {
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "DeepseekV32MTPModel",
}


def attend_densely(model_config: ModelConfig, platform: str) -> None:
    """Has a DSA model built without indexers; leaves every other model alone.

    A `max_model_len` that is to be found automatically stops at `index_topk`.

    Args:
        model_config: Of a target or a draft; changed in place.
        platform: What to call the platform in an error.

    Raises:
        RefusedOptionError: `max_model_len` is longer than `index_topk`.
    """
    config = model_config.hf_config
    top_k = getattr(config, "index_topk", None)
    if top_k is None or _DSA_ARCHITECTURES.isdisjoint(model_config.architectures):
        return
    if model_config.original_max_model_len == -1:
        model_config.max_model_len = min(model_config.max_model_len, top_k)
    if model_config.max_model_len > top_k:
        raise RefusedOptionError(
            f"{config.architectures[0]} on the {platform}: max_model_len "
            f"{model_config.max_model_len} is longer than index_topk {top_k}. Sparse "
            "attention is not available there, and dense attention is the same only "
            f"up to index_topk tokens. Set --max-model-len {top_k} or less."
        )
    # Models of text alone, so the text's config is the model's.
    model_config.hf_config = model_config.hf_text_config = _dense_form(config)


def drop_unbuilt_indexers(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Drops the indexers' tensors from `weights` if `model` was built without any."""
    has_indexer = any(".indexer." in name for name, _ in model.named_parameters())
    for name, tensor in weights:
        if has_indexer or ".indexer." not in name:
            yield name, tensor


def _dense_form(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns `config` without its indexer.

    DeepSeek-V3 is V3.2 and GLM-MoE-DSA without one. The class matters: that of
    GLM-MoE-DSA answers `index_topk` with a default where an instance has none.
    """
    dense = copy.copy(config)
    dense.__class__ = DeepseekV3Config
    dense.model_type = config.model_type
    for field in [field for field in vars(dense) if field.startswith("index")]:
        del vars(dense)[field]
    return dense
