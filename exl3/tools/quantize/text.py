# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The calibration text on its way through the model, layer by layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from exl3.format.errors import TensorError
from exl3.model import DraftLayer, StreamedLayer, StreamedModel
from exl3.tools.quantize.calibrate import LayerInputs, NotFiniteError, run_layer
from exl3.tools.quantize.hessian import Hessian
from exl3.tools.quantize.workers import Workers
from exl3.tools.shared.staging import StagedCheckpoint


@dataclass
class Text:
    """The calibration text on its way through the model.

    Attributes:
        model: The source's model.
        tokens: Token ids `[windows, T]`.
        hidden: Hidden states `[1, T, H]` of each window behind the last layer.
        drafts: The same behind each draft layer, by its index.
    """

    model: StreamedModel
    tokens: Tensor
    hidden: list[Tensor] = field(default_factory=list)
    drafts: dict[int, list[Tensor]] = field(default_factory=dict)

    def start(self) -> None:
        """Begins with the embeddings."""
        self.hidden = list(self.model.embed(self.tokens).split(1))

    def state(self) -> dict[str, Tensor]:
        """What a run that goes on needs."""
        streams = {-1: self.hidden, **self.drafts}
        return {
            f"{layer}.{window}": hidden
            for layer, stream in streams.items()
            for window, hidden in enumerate(stream)
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from a `state`."""
        streams: dict[int, dict[int, Tensor]] = {}
        for name, hidden in state.items():
            layer, window = map(int, name.split("."))
            streams.setdefault(layer, {})[window] = hidden
        found = {
            layer: [stream[window] for window in range(len(stream))]
            for layer, stream in streams.items()
        }
        self.hidden = found.pop(-1)
        self.drafts = found

    def run(self, layer: StreamedLayer, workers: Workers, **watch: Any) -> LayerInputs:
        """Takes the text through a layer; see `run_layer`.

        Raises:
            TensorError: Its outputs are not finite. Names the weight that is not.
        """
        try:
            return self._run(layer, workers, watch)
        except NotFiniteError as error:
            raise TensorError(
                f"{self._damaged(layer) or layer.name}: holds or gives infinities or "
                "NaN on the text; fetch the file again, or repair the source checkpoint"
            ) from error

    def _run(
        self, layer: StreamedLayer, workers: Workers, watch: dict[str, Any]
    ) -> LayerInputs:
        if not isinstance(layer, DraftLayer):
            return run_layer(layer, self.hidden, [], workers, **watch)
        before = self.drafts.get(layer.index - 1, self.hidden)
        stream = [hidden[:, :-1] for hidden in before]  # nothing follows the last token
        length = stream[0].shape[1]
        following = list(self.tokens[:, -length:].split(1))
        found = run_layer(layer, stream, following, workers, **watch)
        self.drafts[layer.index] = stream
        return found

    def _damaged(self, layer: StreamedLayer) -> str | None:
        """The first tensor that is not finite, of a layer or the embeddings."""
        tensors = self.model.tensors
        for name in tensors.names():
            is_read = name.startswith((f"{layer.name}.", "model.embed_tokens."))
            if is_read and not tensors.floating(name).isfinite().all():
                return name
        return None

    def layers(self, first: int) -> Iterator[StreamedLayer]:
        """Decoder layers from `first` on, and draft layers; each is freed behind."""
        yield from self.model.layers(first)
        for index in self.model.draft_layers:
            if index >= first:
                layer = self.model.draft_layer(index)
                yield layer
                layer.free()

    def head_hessian(self, workers: Workers) -> Hessian:
        """Second moments of what the head reads, from the trunk and from drafts."""
        streams = {"model.norm": self.hidden}
        for index, stream in self.drafts.items():
            streams[f"model.layers.{index}.shared_head.norm"] = stream
        found = Hessian(self.hidden[0].shape[-1])
        for name, stream in streams.items():
            for normed in workers.map(self.model.norm(name), stream):
                found.add(normed[0], run=workers.map)
        return found


def measure_sensitivities(
    text: Text, out: StagedCheckpoint, workers: Workers, bar: Any
) -> dict[int, list[float]]:
    """How much the errors of the decoder layers' experts matter, by layer index.

    Args:
        text: Is run through the decoder layers.
        out: Keeps what is known of each layer, so that a stopped run goes on there.
        workers: Do the work.
        bar: Progress, in layers.
    """
    order = range(text.model.num_layers)
    found: dict[int, list[float]] = {}
    for index in order:
        if out.has(_step(index)):
            found[index] = out.note(_step(index))
    todo = [index for index in order if index not in found]
    if not todo:
        return found
    state = out.read_state() if found else None
    if state is None:
        text.start()
    else:
        text.restore(state)
    for layer in text.model.layers(todo[0]):
        found[layer.index] = text.run(layer, workers).sensitivities
        out.record(_step(layer.index), found[layer.index], text.state())
        bar.update()
    text.hidden = []
    return found


def _step(layer: int) -> str:
    return f"sensitivity-{layer}"
