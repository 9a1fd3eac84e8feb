# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A model of transformers without weights, in which single layers are run.

Masks, positions and rotary embeddings are the model's own: one layer is put into its
place, and the model runs over it.
"""

from collections.abc import Mapping
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from exl3.format.errors import CheckpointError, UnsupportedFormatError

#: Model types whose layers of transformers were checked against whole models.
FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "qwen3_moe",
)
#: Fields that the layers of a type compute as here, whatever the config says.
_FIXED: Mapping[str, Mapping[str, Any]] = {
    **{family: {"scoring_func": "sigmoid"} for family in FAMILIES[1:-1]},
    "deepseek_v2": {"scoring_func": "softmax", "norm_topk_prob": False},
}
#: Fields of a config that only say how weights are stored.
_STORAGE_FIELDS = ("quantization_config", "hybrid_tr3_tail", "architectures", "dtype")


class Skeleton:
    """Makes layers of a model type, and runs them.

    Args:
        text_config: The text model's fields of `config.json`.

    Raises:
        CheckpointError: The model type is unknown, or the config is not valid.
    """

    def __init__(self, text_config: Mapping[str, Any]):
        model_type = text_config.get("model_type")
        if model_type not in FAMILIES:
            raise UnsupportedFormatError(
                f"config.json: model_type is {model_type!r}; this command runs "
                f"{', '.join(FAMILIES)}"
            )
        for name, value in _FIXED.get(model_type, {}).items():
            if text_config.get(name, value) != value:
                raise UnsupportedFormatError(
                    f"config.json: {name} is {text_config[name]!r}; this command runs "
                    f"{model_type} with {value!r} only"
                )
        fields = {
            name: value
            for name, value in text_config.items()
            if name not in (*_STORAGE_FIELDS, "model_type")
        }
        try:
            self.config = AutoConfig.for_model(model_type, **fields)
        except Exception as error:  # whatever transformers makes of a bad value
            reason = " ".join(str(error).split())
            raise CheckpointError(f"config.json: {reason[:300]}") from error
        self.num_layers: int = self.config.num_hidden_layers
        config = deepcopy(self.config)
        config.num_hidden_layers = 1
        with torch.device("meta"):
            self._model = AutoModel.from_config(config, attn_implementation="sdpa")
        self._layer_class = type(self._model.layers[0])
        self._norm = self._model.norm
        self._model.norm = nn.Identity()
        self._model.embed_tokens = None
        # Its frequencies are computed from the config, not stored.
        self._model.rotary_emb = type(self._model.rotary_emb)(self._model.config)
        self._model.eval()

    def norm(self) -> nn.Module:
        """The norm of a hidden state, on the meta device."""
        return deepcopy(self._norm)

    def layer(self, index: int, width: int) -> nn.Module:
        """A decoder layer on the meta device.

        Args:
            index: Its global index; a draft layer's is beyond the decoder layers.
            width: Its routed experts; 0 for a dense layer.
        """
        config = deepcopy(self._model.config)
        config.num_hidden_layers = self.num_layers
        for field, of_draft in (
            ("mlp_layer_types", "sparse"),
            ("indexer_types", "full"),
        ):
            types = getattr(config, field, None)
            if types is not None and index >= self.num_layers:
                missing = index + 1 - len(types)
                setattr(config, field, [*types, *[of_draft] * missing])
        if width:
            known = hasattr(config, "n_routed_experts")
            setattr(config, "n_routed_experts" if known else "num_experts", width)
        with torch.device("meta"):
            layer = self._layer_class(config, index)
        if getattr(layer.self_attn, "skip_topk", False):
            layer.self_attn.indexer = _EveryToken(config.index_topk)
        return layer.eval()

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Runs a layer over hidden states `[B, T, H]` from the first position on."""
        # A model of its own for every call: threads may run layers side by side.
        model = copy(self._model)
        model._modules = {**model._modules, "layers": nn.ModuleList([layer])}
        return model(inputs_embeds=hidden, use_cache=False).last_hidden_state


class _EveryToken(nn.Module):
    """Stands for the choice of tokens that a layer takes over from one before it.

    Within `index_topk` tokens every choice is all of them.
    """

    def __init__(self, index_topk: int):
        super().__init__()
        self.index_topk = index_topk

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """The indices of all tokens `[B, T, T]`, for hidden states `[B, T, H]`."""
        batch, length, _hidden = hidden.shape
        if length > self.index_topk:
            raise CheckpointError(
                f"config.json: index_topk is {self.index_topk}, and the text is cut "
                f"into windows of {length} tokens; use windows that are no longer"
            )
        return torch.arange(length).expand(batch, length, length)
