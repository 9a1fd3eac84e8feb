# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Gives every layer its own number of routed experts.

A MoE layer is built from a view of the config in which the model-wide width is that
layer's. The widths come from `vllm/transformers_utils/expert_widths.py`; a config
without them is never touched, and the model is then upstream's.
"""

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from exl3.format.names import layer_of
from vllm.model_executor.models.utils import maybe_fuse_shared_experts
from vllm.refusal import RefusedOptionError
from vllm.transformers_utils.expert_widths import RESOLVED_FIELD, scalar_fields

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from vllm.config import VllmConfig


def layer_index(prefix: str, config: "PreTrainedConfig") -> int:
    """The global index of the layer that a module belongs to.

    `model.layers.3.mlp` is layer 3. `mtp.layers.0.mlp` is the first draft layer, and
    stands after the decoder layers.

    Raises:
        ValueError: The prefix names no layer.
    """
    index = layer_of(prefix, config.num_hidden_layers)
    if index is None:
        raise ValueError(
            f"the module prefix {prefix!r} names no layer, so its number of routed "
            "experts is unknown; expected 'layers.<index>' in it"
        )
    return index


def layer_width(prefix: str, config: "PreTrainedConfig") -> int | None:
    """The width of a module's layer, or None if the model has one width throughout.

    Raises:
        ValueError: The prefix names no layer, or one past the list.
    """
    widths = getattr(config, RESOLVED_FIELD, None)
    if widths is None:
        return None
    index = layer_index(prefix, config)
    if index >= len(widths):
        raise ValueError(
            f"the config gives {len(widths)} layers their routed experts, and the "
            f"module {prefix!r} belongs to layer {index}"
        )
    return widths[index]


def layer_config(config: "PreTrainedConfig", prefix: str) -> "PreTrainedConfig":
    """The config from which a MoE layer is built.

    Args:
        config: The (text) model's config.
        prefix: The layer's module prefix.

    Returns:
        The config itself, or a view of it with this layer's width as the model's.
    """
    width = layer_width(prefix, config)
    if width is None:
        return config
    view = copy.copy(config)
    for field in scalar_fields(config):
        setattr(view, field, width)
    return view


def layer_vllm_config(vllm_config: "VllmConfig", prefix: str) -> "VllmConfig":
    """As `layer_config`, for layers that are built from the engine's config."""
    text = vllm_config.model_config.hf_text_config
    view = layer_config(text, prefix)
    if view is text:
        return vllm_config
    layer_view = copy.copy(vllm_config)
    layer_view.model_config = copy.copy(vllm_config.model_config)
    layer_view.model_config.hf_text_config = view
    if vllm_config.model_config.hf_config is text:
        layer_view.model_config.hf_config = view
    return layer_view


class BuiltByLayerWidth:
    """Mixin of a MoE layer that takes its width from the `config` it is given.

    Stands before upstream's class among the bases.
    """

    #: Whether the model's `load_weights` places shared experts that run fused.
    places_shared_experts = False

    def __init__(self, config, *args, prefix: str = "", **kwargs) -> None:
        layer = layer_config(config, prefix)
        super().__init__(layer, *args, prefix=prefix, **kwargs)
        self._refuse_fused_shared_experts(config, prefix)

    def _refuse_fused_shared_experts(
        self, config: "PreTrainedConfig", prefix: str
    ) -> None:
        fused = getattr(self, "is_fused_shared_expert_enabled", False)
        unequal = layer_width(prefix, config) is not None
        if fused and unequal and not self.places_shared_experts:
            raise ValueError(
                f"{prefix}: {type(self).__name__} cannot run its shared experts fused "
                "with unequal numbers of routed experts; set "
                "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0"
            )


class BuiltByEngineWidth(BuiltByLayerWidth):
    """As `BuiltByLayerWidth`, for a layer that is given the engine's config."""

    def __init__(self, vllm_config: "VllmConfig", prefix: str = "", **kwargs) -> None:
        layer = layer_vllm_config(vllm_config, prefix)
        super(BuiltByLayerWidth, self).__init__(layer, prefix=prefix, **kwargs)
        self._refuse_fused_shared_experts(
            vllm_config.model_config.hf_text_config, prefix
        )


class LoadsByLayerWidth:
    """Mixin of a model or draft that places shared experts that run fused.

    Stands before upstream's class among the bases.
    """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads checkpoint tensors by name, as upstream does, by layer's width."""
        fused = self.is_fused_shared_expert_enabled
        return super().load_weights(
            place_shared_experts(weights, self.config, fused=fused)
        )


def place_shared_experts(
    weights: Iterable[tuple[str, torch.Tensor]],
    config: "PreTrainedConfig",
    *,
    fused: bool,
) -> Iterable[tuple[str, torch.Tensor]]:
    """Names each layer's shared experts by the slots that follow its routed ones.

    Where the shared experts run fused with the routed ones (ROCm), shared expert j of
    a layer is expert `width + j` of that layer. Upstream counts from the model-wide
    width, which is right only for the widest layers; tensors that are named here pass
    through it unchanged.

    Args:
        weights: Checkpoint tensors by name.
        config: The (text) model's config.
        fused: Whether the model's shared experts run fused.

    Yields:
        Tensors by name. The input, unless fused and of unequal widths.
    """
    if not fused or getattr(config, RESOLVED_FIELD, None) is None:
        yield from weights
        return
    count = getattr(config, "n_shared_experts", None) or 1
    for name, weight in weights:
        if "mlp.shared_experts." not in name:
            yield name, weight
            continue
        yield from maybe_fuse_shared_experts(
            [(name, weight)],
            n_routed_experts=layer_width(name, config) or 0,
            n_shared_experts=count,
            enabled=True,
        )


def refuse_unsupported(vllm_config: "VllmConfig") -> None:
    """Refuses the features that assume one width for the whole model.

    Raises:
        RefusedOptionError: One of them is on, and the model's widths are unequal; or
            expert parallelism would leave a rank without an expert of some layer.
    """
    text = vllm_config.model_config.hf_text_config
    widths = getattr(text, RESOLVED_FIELD, None)
    if widths is None or len({width for width in widths if width}) <= 1:
        return
    parallel = vllm_config.parallel_config
    uses = {
        "--enable-eplb": parallel.enable_eplb,
        "--enable-elastic-ep": parallel.enable_elastic_ep,
        "--enable-ep-weight-filter": parallel.enable_ep_weight_filter,
        "--enable-lora": vllm_config.lora_config is not None,
    }
    used = [option for option, on in uses.items() if on]
    if used:
        raise RefusedOptionError(
            f"{', '.join(used)}: not possible with unequal numbers of routed experts "
            f"(this checkpoint has {sorted({w for w in widths if w})}); "
            "leave the option out"
        )
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    ranks *= parallel.prefill_context_parallel_size
    built = (
        widths if vllm_config.speculative_config else widths[: text.num_hidden_layers]
    )
    narrow = [layer for layer, width in enumerate(built) if 0 < width < ranks]
    if parallel.enable_expert_parallel and narrow:
        raise RefusedOptionError(
            f"--enable-expert-parallel over {ranks} ranks: layers {narrow} have fewer "
            "routed experts than that, so a rank would hold none; use at most "
            f"{min(built[layer] for layer in narrow)} ranks, or leave the option out"
        )
