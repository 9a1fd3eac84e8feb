# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A checkpoint of any size, run one layer after another in float32.

    model = StreamedModel.open(folder)
    hidden = model.embed(tokens)
    for layer in model.layers():
        hidden = layer(hidden)
    logits = model.head(hidden)

Shapes: B sequences, T tokens each, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.layers import LayerPlan
from exl3.checkpoint.plan import Checkpoint, read_config, read_with_modules, text_config
from exl3.format.errors import TensorError
from exl3.model.layer import DraftLayer, Head, StreamedLayer, fill
from exl3.model.skeleton import Skeleton
from exl3.model.tensors import TensorSource


class StreamedModel:
    """A checkpoint's model, of which one layer at a time is in memory.

    Attributes:
        config: The fields of `config.json`.
        text_config: The text model's among them.
        plan: How the checkpoint's EXL3 modules are stored.
        tensors: Reads single tensors and weights.
        widths: Routed experts of each layer that has some, drafts included.
        num_layers: Decoder layers.
        draft_layers: Global indices of the draft layers that are stored.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        checkpoint: Checkpoint,
        tensors: TensorSource,
    ):
        self.config = config
        self.text_config = text_config(config)
        self.plan = checkpoint.plan
        self.tensors = tensors
        self._skeleton = Skeleton(self.text_config)
        resolve_widths(self.text_config, checkpoint.widths)  # refuses contradictions
        gates = checkpoint.widths.gates
        self.widths = {layer: gate.shape[0] for layer, gate in sorted(gates.items())}
        layers = LayerPlan.from_config(self.text_config)
        self.num_layers = layers.num_layers
        self.draft_layers = [
            index
            for index in layers.drafts
            if tensors.has_module(f"model.layers.{index}.eh_proj")
        ]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads a checkpoint's config and headers, and no weight.

        Raises:
            CheckpointError: The checkpoint contradicts itself, or its model type is
                none of those that can be run.
        """
        config = read_config(folder)
        checkpoint, modules = read_with_modules(folder, config)
        return cls(config, checkpoint, TensorSource(folder, checkpoint, modules))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[B, T, H]` of token ids `[B, T]`.

        Raises:
            TensorError: The table has no row for a token.
        """
        name = "model.embed_tokens.weight"
        table = self.tensors.floating(name)
        if tokens.numel() and int(tokens.max()) >= len(table):
            raise TensorError(
                f"{name}: has {len(table)} rows, and the tokenizer gives token "
                f"{int(tokens.max())}; use the tokenizer that belongs to the model"
            )
        return table[tokens].float()

    def layers(self, first: int = 0) -> Iterator[StreamedLayer]:
        """Every decoder layer from `first` on. The next takes its place in memory."""
        for index in range(first, self.num_layers):
            layer = StreamedLayer(
                self._skeleton, self.tensors, index, self.widths.get(index, 0)
            )
            self.tensors.release()
            yield layer
            layer.free()

    def draft_layer(self, index: int) -> DraftLayer:
        """A draft layer, one of `draft_layers`."""
        last = index - 1
        layer = DraftLayer(
            self._skeleton,
            self.tensors,
            index,
            self.widths.get(index, 0),
            previous_norm=(
                f"model.layers.{last}.shared_head.norm"
                if last >= self.num_layers
                else "model.norm"
            ),
        )
        self.tensors.release()
        return layer

    def norm(self, name: str) -> nn.Module:
        """A norm of hidden states: `model.norm`, or a draft's `shared_head.norm`."""
        norm = self._skeleton.norm()
        fill(norm, self.tensors, name)
        return norm

    @cached_property
    def head(self) -> Head:
        """Gives the logits `[B, T, V]` of the last layer's hidden states."""
        return Head(self._skeleton, self.tensors, "model.norm")
