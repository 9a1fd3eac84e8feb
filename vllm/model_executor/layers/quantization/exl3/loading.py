# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Sorts the tensors of a checkpoint on their way to a model.

EXL3 tensors go straight to the layer that holds them, found by the plan's names, so
no model's own loader has to know them. Everything else goes on to that loader: dense
tensors, and the weights of EXL3 modules that the model builds dense.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from re import Match
from typing import Any

import torch
from torch import nn

from exl3.checkpoint.plan import CheckpointPlan
from exl3.format.errors import TensorError
from exl3.format.names import (
    PROJECTION_OF,
    SHARED_H,
    SHARED_WITH_TARGET,
    layer_of,
    parse_name,
)
from vllm.model_executor.layers.quantization.exl3.config import Exl3Config
from vllm.model_executor.layers.quantization.exl3.dense import DenseModules
from vllm.model_executor.layers.quantization.exl3.experts import (
    Exl3ExpertsMethod,
    ExpertMatrix,
)
from vllm.model_executor.layers.quantization.exl3.linear import Exl3LinearMethod
from vllm.model_executor.layers.quantization.exl3.tensors import (
    BIAS,
    PARTS,
    Arrivals,
    needed_parts,
)

#: How fields begin that a dense or otherwise quantized weight left behind.
_OF_DENSE_WEIGHTS = ("weight", "input_scale")
Weights = Iterable[tuple[str, torch.Tensor]]


def load_exl3_tensors(
    model: nn.Module, quant_config: Exl3Config, draft: bool = False
) -> None:
    """Has a model's `load_weights` sort out the EXL3 tensors first.

    Args:
        model: A whole model, target or draft, with its layers built.
        quant_config: The config that its layers were built from.
        draft: Whether it is a draft.
    """
    load_others: Callable[..., Any] = model.load_weights

    def load_weights(weights: Weights, *args: Any, **kwargs: Any) -> Any:
        tensors = _Tensors(model, quant_config)
        loaded = load_others(tensors.sort(weights), *args, **kwargs)
        tensors.check_complete()
        # Upstream checks models that are not quantized.
        if loaded is not None:
            tensors.check_others(loaded, SHARED_WITH_TARGET if draft else ())
        return loaded

    model.load_weights = load_weights


class _Tensors:
    """One load: where each tensor belongs, and which have arrived."""

    def __init__(self, model: nn.Module, quant_config: Exl3Config):
        self.model = model
        self.plan: CheckpointPlan = quant_config.plan
        self.arrivals = Arrivals()
        self.linears: dict[str, list[tuple[nn.Module, Exl3LinearMethod]]] = {}
        self.experts: dict[str, tuple[nn.Module, Exl3ExpertsMethod]] = {}
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, Exl3LinearMethod):
                for name in method.matrices:
                    self.linears.setdefault(name, []).append((module, method))
            elif isinstance(method, Exl3ExpertsMethod):
                self.experts[method.name] = module, method
        self.dense = DenseModules(model, quant_config)
        self._refuse_unplaced()

    def sort(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Places the EXL3 tensors, and yields the others."""
        for name, tensor in weights:
            match = parse_name(name)
            if match is None:
                yield name, tensor
                continue
            module, field = match["module"], match["field"]
            is_expert = match["experts"] in self.plan.experts
            if not is_expert and module not in self.plan.linears:
                if not self.plan.is_superseded(name):
                    yield name, tensor
            elif field not in PARTS:
                # A module may have more than its matrix: a gate has a bias of its own.
                if not field.startswith(_OF_DENSE_WEIGHTS):
                    yield name, tensor
            elif is_expert:
                self._place_expert(match, tensor)
            elif module in self.linears:
                yield from self._place_linear(module, field, tensor)
            elif module in self.dense:
                self.arrivals.add(module, field, name)
                yield from self.dense.add(module, field, tensor)

    def check_complete(self) -> None:
        """Refuses a checkpoint that lacks a tensor of a layer.

        Raises:
            TensorError: Names the first of the missing ones.
        """
        missing = list(self._missing())
        if missing:
            raise TensorError(
                f"{missing[0]}: missing from the files that were loaded, as are "
                f"{len(missing) - 1} others; fetch the missing file, or rebuild the "
                "index"
            )

    def check_others(self, loaded: Collection[str], spared: tuple[str, ...]) -> None:
        """Refuses a checkpoint that lacks a dense tensor of a layer.

        Args:
            loaded: The parameters that the model's own loader has filled.
            spared: How the names of modules end that may lack theirs.

        Raises:
            TensorError: Names the first of the missing ones, as the model does.
        """
        own = {id(parameter) for parameter in self._exl3_parameters()}
        missing = [
            name
            for name, parameter in self.model.named_parameters()
            if name not in loaded
            and id(parameter) not in own
            and parameter.numel()
            and not name.rpartition(".")[0].endswith(spared)
        ]
        if missing:
            raise TensorError(
                f"{missing[0]}: the files that were loaded have nothing for this "
                f"parameter of the model, nor for {len(missing) - 1} others; fetch the "
                "missing file, or rebuild the index"
            )

    def _exl3_parameters(self) -> Iterator[nn.Parameter]:
        """What is filled here; a bias is filled by the model."""
        linears = [layer for layers in self.linears.values() for layer, _ in layers]
        for module in [*linears, *(layer for layer, _ in self.experts.values())]:
            for name, parameter in module.named_parameters():
                if name != "bias":
                    yield parameter

    def _place_linear(
        self, module: str, field: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        name = f"{module}.{field}"
        self.arrivals.add(module, field, name)
        if PARTS[field] != BIAS:
            for layer, method in self.linears[module]:
                method.load(layer, module, field, tensor)
            return
        layer, method = self.linears[module][0]
        if getattr(layer, "bias", None) is None:
            raise TensorError(
                f"{name}: the model has no bias there; is this the config of another "
                "model?"
            )
        # Stored with the padding of its matrix.
        yield name, tensor[: method.out_features[module]]

    def _place_expert(self, name: Match[str], tensor: torch.Tensor) -> None:
        experts, expert, projection, rank, field = name.group(
            "experts", "expert", "projection", "rank", "field"
        )
        if experts not in self.experts:  # of another stage, or of the other model
            return
        layer, method = self.experts[experts]
        matrix = ExpertMatrix(
            experts,
            None if expert == SHARED_H else int(expert),
            PROJECTION_OF[projection],
            int(rank or 0),
        )
        if method.holds(matrix):
            self.arrivals.add(matrix, field, name.string)
            method.load(layer, matrix, field, tensor)

    def _missing(self) -> Iterator[str]:
        for module in [*self.linears, *self.dense]:
            matrix = self.plan.linears[module]
            needed = needed_parts(matrix.codebook, matrix.has_bias)
            for field in self.arrivals.missing(module, needed, matrix.codebook):
                yield f"{module}.{field}"
        for _, method in self.experts.values():
            yield from method.missing(self.arrivals)

    def _refuse_unplaced(self) -> None:
        """Refuses an EXL3 module of a layer of this model that nothing would take.

        Otherwise the layer would stay without weights, and without a word.
        """
        placed = {*self.linears, *self.experts, *self.dense}
        layers = {_layer(module) for module in placed} - {None}
        for module in {*self.plan.linears, *self.plan.experts} - placed:
            # Layers without an indexer of their own have one stored.
            if _layer(module) in layers and ".indexer." not in module:
                raise TensorError(
                    f"{module}: stored as EXL3, but the model has no module for it; "
                    "is this the config of another model?"
                )


def _layer(module: str) -> tuple[str, int] | None:
    """The layer that a module belongs to: what it is a layer of, and its index."""
    index = layer_of(module, 0)
    return None if index is None else (module.partition("layers.")[0], index)
