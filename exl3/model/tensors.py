# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads single tensors and weights of a checkpoint, and decodes what is EXL3."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from exl3 import ops
from exl3.checkpoint.modules import Fields
from exl3.checkpoint.plan import Checkpoint, read_config, read_with_modules
from exl3.codec import expand_signs
from exl3.format.constants import TILE, Codebook
from exl3.format.errors import TensorError, UnsupportedFormatError
from exl3.format.names import PROJECTION_OF, PROJECTIONS, SHARED_H, parse_name

#: What a weight that is no trellis may be stored as.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: Files are closed when so many bytes of them are mapped, which count as memory.
_MOST_MAPPED = 256 << 20


class TensorSource:
    """The tensors of a checkpoint, read one by one.

    Args:
        folder: The checkpoint's folder.
        checkpoint: How it is stored.
        modules: Every tensor by its module, as `read_with_modules` gives them.
    """

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, modules: Mapping[str, Fields]
    ):
        self.folder = folder
        self.plan = checkpoint.plan
        self._modules = modules
        self._open: dict[str, Any] = {}
        self._mapped = 0  # bytes read from the open files

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads the headers of a checkpoint.

        Raises:
            CheckpointError: The checkpoint contradicts itself.
        """
        return cls(folder, *read_with_modules(folder, read_config(folder)))

    def names(self) -> Collection[str]:
        """The names of all stored tensors."""
        return [
            header.name
            for fields in self._modules.values()
            for header in fields.values()
        ]

    def __contains__(self, name: str) -> bool:
        module, _, field = name.rpartition(".")
        return field in self._modules.get(module, {})

    def has_module(self, module: str) -> bool:
        """Whether anything is stored under a module's own name."""
        return module in self._modules

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored. It may lie in the mapped file: do not write to it.

        Raises:
            TensorError: There is no such tensor.
        """
        module, _, field = name.rpartition(".")
        header = self._modules.get(module, {}).get(field)
        if header is None:
            raise TensorError(
                f"{name}: is not stored in {self.folder}, and the model needs it; "
                "fetch the missing file, or correct config.json"
            )
        if self._mapped > _MOST_MAPPED:
            self.release()
        if header.file not in self._open:
            path = self.folder / header.file
            self._open[header.file] = safe_open(path, framework="pt")
        self._mapped += header.num_bytes
        return self._open[header.file].get_tensor(name)

    def release(self) -> None:
        """Closes the files that were read. They open again when they are needed."""
        self._open.clear()
        self._mapped = 0

    def dense(self, module: str, shape: Sequence[int] | None = None) -> Tensor:
        """The weight of a linear module or of a routed expert's projection.

        Args:
            module: Its name: `model.layers.3.mlp.experts.7.gate_proj`, without a rank.
            shape: `[n, k]` as the model has it. A trellis holds whole blocks of 128:
                what is beyond is left out. None: the weight in stored sizes.

        Returns:
            `[n, k]`: float32 if it is decoded from EXL3, or else as it is stored.

        Raises:
            CheckpointError: There is no such weight, or it has another shape.
        """
        matrix = self.plan.linears.get(module)
        if matrix is not None:
            weight = self._decode(module, matrix.codebook)
        else:
            weight = self._expert(module)
        if weight is None:
            name = f"{module}.weight"
            return self.floating(name, shape)
        return weight if shape is None else _cut(weight, shape, module)

    def floating(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor of an unquantized type.

        Args:
            name: The tensor's name.
            shape: What the model has. The bias of an EXL3 module may be longer, and is
                cut.

        Raises:
            CheckpointError: There is none, or its type or shape is another.
        """
        tensor = self.read(name)
        if tensor.dtype not in _FLOATS:
            raise UnsupportedFormatError(
                f"{name}: is stored as {tensor.dtype}, which belongs to another "
                "quantization; convert the checkpoint to BF16 or EXL3"
            )
        if shape is None:
            return tensor
        if name.removesuffix(".bias") in self.plan.linears:
            return _cut(tensor, shape, name)
        if tuple(tensor.shape) != tuple(shape):
            raise TensorError(
                f"{name}: has the shape {list(tensor.shape)}, and by config.json it is "
                f"{list(shape)}; correct config.json, or fetch the files again"
            )
        return tensor

    def _expert(self, module: str) -> Tensor | None:
        """A routed expert's weight, if its layer is EXL3."""
        match = parse_name(f"{module}.weight")
        layer = self.plan.experts.get(match["experts"] or "") if match else None
        if match is None or layer is None:
            return None
        experts, projection = match["experts"], PROJECTION_OF[match["projection"]]
        spelling = layer.spelling[PROJECTIONS.index(projection)]
        codebook = layer.matrix(int(match["expert"]), projection).codebook
        whole = f"{experts}.{match['expert']}.{spelling}"
        if not layer.sliced:
            return self._decode(whole, codebook)
        parts = [
            self._decode(
                f"{whole}.rank{rank}",
                codebook,
                f"{experts}.{SHARED_H}.{spelling}.rank{rank}",
            )
            for rank in range(layer.ranks)
        ]
        # Gate and up are cut by outputs, down by inputs.
        return torch.cat(parts, 1 if projection == "down" else 0)

    def _decode(self, module: str, codebook: Codebook, shared: str = "") -> Tensor:
        """A trellis's weight `[n, k]` in float32.

        Args:
            module: The module's name, with its rank.
            codebook: The trellis's codebook.
            shared: The name under which experts share what this module has not.
        """

        def scales(field: str, signs: str) -> Tensor:
            if f"{module}.{field}" in self:
                return self.read(f"{module}.{field}")
            if f"{module}.{signs}" in self:
                return expand_signs(self.read(f"{module}.{signs}"))
            return self.read(f"{shared}.{field}")

        suh, svh = scales("suh", "su"), scales("svh", "sv")
        trellis = self.read(f"{module}.trellis")
        rows, columns, words = trellis.shape
        strips = trellis.transpose(0, 1).flatten()
        k, n = rows * TILE, columns * TILE
        return ops.dequant(strips, suh, svh, k, n, words, int(codebook)).T


def _cut(stored: Tensor, shape: Sequence[int], name: str) -> Tensor:
    """Leaves out what fills a stored tensor up to whole blocks."""
    if any(have < want for have, want in zip(stored.shape, shape, strict=True)):
        raise TensorError(
            f"{name}: is stored with {list(stored.shape)} weights, and by config.json "
            f"it has {list(shape)}; correct config.json, or convert the module again"
        )
    return stored[tuple(slice(size) for size in shape)]
