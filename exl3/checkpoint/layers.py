# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Which layers a model has, and which of them have routed experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as brief  # a hostile value must not fill the log
from typing import Any

from exl3.format.errors import CheckpointError

_DRAFT_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class LayerPlan:
    """Which layers a model has, by global index."""

    num_layers: int  # decoder layers
    num_drafts: int  # draft layers, after the decoder layers
    moe_layers: tuple[int, ...]  # decoder layers that have routed experts

    @property
    def drafts(self) -> tuple[int, ...]:
        """Global indices of the draft layers. Each has routed experts."""
        return tuple(range(self.num_layers, self.num_layers + self.num_drafts))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LayerPlan":
        """Reads the layer counts of a DeepSeek, GLM or Qwen config.

        Raises:
            CheckpointError: A count is missing or is no count.
        """
        num_layers = count_field(config, "num_hidden_layers")
        num_drafts = 0
        for field in _DRAFT_FIELDS:
            if config.get(field):
                num_drafts = count_field(config, field)
        types = config.get("mlp_layer_types")
        first_dense = count_field(config, "first_k_dense_replace", 0)
        every = count_field(config, "moe_layer_freq", 1)
        step = count_field(config, "decoder_sparse_step", 1)
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(at) is not int for at in dense):
            raise CheckpointError(
                f"config.json: mlp_only_layers is {brief(dense)}; expected a list of "
                "layer indices"
            )
        dense = set(dense)

        def is_moe(layer: int) -> bool:
            if isinstance(types, list) and len(types) == num_layers:
                return types[layer] != "dense"
            if layer in dense or (layer + 1) % step:
                return False
            return layer >= first_dense and layer % every == 0

        moe_layers = tuple(layer for layer in range(num_layers) if is_moe(layer))
        return cls(num_layers, num_drafts, moe_layers)


def count_field(
    config: Mapping[str, Any], field: str, default: int | None = None
) -> int:
    """A field that counts something.

    Args:
        config: The model's config.
        field: The field's name.
        default: What stands for an absent field, null or 0; None if it must be there.
    """
    value = config.get(field)
    if default is not None and value in (None, 0):
        return default
    if type(value) is not int or not 0 <= value < 100_000:
        raise CheckpointError(
            f"config.json: {field} is {brief(value)}; expected a count"
        )
    return value
