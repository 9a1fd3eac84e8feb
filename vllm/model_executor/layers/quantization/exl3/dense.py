# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""EXL3 modules that a model builds dense: they are dequantized as they are loaded.

Upstream gives some small modules no quantization config: the router's gate, `eh_proj`
of a draft, parts of the indexer.
"""

from collections.abc import Iterator

import torch
from torch import nn

from exl3 import ops
from exl3.format.constants import padded
from exl3.format.errors import TensorError
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.exl3.config import Exl3Config
from vllm.model_executor.layers.quantization.exl3.tensors import (
    BIAS,
    INPUT,
    MARKER,
    OUTPUT,
    PARTS,
    TRELLIS,
    check_marker,
    check_trellis,
    needed_parts,
    scales,
    trellis_shape,
)


class DenseModules:
    """The EXL3 modules of a checkpoint for which a model has a dense weight.

    Args:
        model: The model, with its layers built.
        quant_config: The config that its layers were built from.
    """

    def __init__(self, model: nn.Module, quant_config: Exl3Config):
        self.plan = quant_config.plan
        #: [out-features, in-features] of each module's weight in the model.
        self._shapes: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        for path, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
                continue
            # A draft's block is built one level deeper than it is stored.
            name = getattr(module, "prefix", "") or path.replace(".mtp_block.", ".")
            parts = quant_config.parts_of(name)
            if isinstance(module, LinearBase):
                inputs = module.input_size
                sizes = getattr(module, "output_sizes", [module.output_size])
            else:
                sizes, inputs = weight.shape[:1], weight.shape[1]
            if len(sizes) != len(parts):  # one module has several outputs
                sizes = [sum(sizes)]
            for stored, size in zip(parts, sizes, strict=False):
                if stored is not None:
                    self._shapes[stored] = size, inputs

    def __contains__(self, module: str) -> bool:
        return module in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def add(
        self, module: str, field: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Takes one stored tensor; yields the module's weight with the last one.

        Args:
            module: The module, by the checkpoint's name.
            field: The last part of the tensor's name.
            tensor: As it is stored. Its memory is free for reuse afterwards.

        Yields:
            `<module>.weight`, float32 [out-features, in-features], and its bias.
        """
        matrix, name = self.plan.linears[module], f"{module}.{field}"
        part = PARTS[field]
        if part == BIAS:
            yield name, tensor[: self._shapes[module][0]]
            return
        if part == MARKER:
            check_marker(tensor, matrix.codebook, name)
        elif part == TRELLIS:
            check_trellis(tensor, trellis_shape(matrix), name)
        else:
            size = matrix.in_features if part == INPUT else matrix.out_features
            tensor = scales(tensor, field, size, name)
        parts = self._parts.setdefault(module, {})
        parts[part] = tensor.clone()
        if sum(parts) == needed_parts(matrix.codebook):
            yield f"{module}.weight", self._weight(module, self._parts.pop(module))

    def _weight(self, module: str, parts: dict[int, torch.Tensor]) -> torch.Tensor:
        matrix, (size, inputs) = self.plan.linears[module], self._shapes[module]
        stored = matrix.out_features, matrix.in_features
        if stored != (padded(size), padded(inputs)):
            raise TensorError(
                f"{module}.trellis: {list(stored)} out- and in-features are stored, "
                f"and the model's are {[size, inputs]}, which are stored as "
                f"{[padded(size), padded(inputs)]}; is this the config of another "
                "model?"
            )
        weight = ops.dequant(
            parts[TRELLIS].transpose(0, 1).flatten(),
            parts[INPUT],
            parts[OUTPUT],
            matrix.in_features,
            matrix.out_features,
            matrix.words,
            int(matrix.codebook),
        )
        return weight[:inputs, :size].T.contiguous()
