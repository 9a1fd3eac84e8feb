# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs a text through a checkpoint, and counts what its routed experts do.

Shapes: B windows of T tokens, H hidden, n tokens of one expert.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from exl3.format.errors import TensorError
from exl3.model import StreamedLayer, StreamedModel
from exl3.tools.prune.layers import Source
from exl3.tools.prune.statistics import LayerStatistics
from exl3.tools.shared.progress import progress_bar
from exl3.tools.shared.staging import StagedCheckpoint

#: Tokens that go through a layer at a time. More of them take more memory: attention
#: has a score for each head and pair of tokens in a window.
_BATCH_TOKENS = 2048


class _Watch:
    """Sums over each expert's tokens; an observer of `RoutedExperts`."""

    def __init__(self, width: int):
        self.chosen = [0] * width
        self.added = [0.0] * width

    def __call__(
        self,
        expert: int,
        tokens: Tensor,
        x: Tensor,
        weight: Tensor,
        inner: Tensor,
        out: Tensor,
    ) -> None:
        """Counts the tokens `[n]` of an expert, and sizes its outputs `[n, H]`."""
        self.chosen[expert] += len(tokens)
        self.added[expert] += float((weight * out.norm(dim=-1)).double().sum())


def gather_statistics(
    source: Source, tokens: Tensor, out: StagedCheckpoint | None
) -> dict[int, LayerStatistics]:
    """Runs windows of text through every layer, one layer in memory at a time.

    Args:
        source: The checkpoint.
        tokens: Token ids `[B, T]`.
        out: Keeps the statistics of each layer and the hidden states behind it, so
            that a stopped run goes on with the next layer. None: nothing is kept.

    Returns:
        Statistics by global layer index: of the decoder layers with routed experts, and
        of the draft layers that follow them.

    Raises:
        CheckpointError: The model cannot be run.
    """
    model = StreamedModel.open(source.folder)
    order = [*range(model.num_layers), *model.draft_layers]
    notes = {}
    for index in order:
        if out is None or not out.has(_step(index)):
            break
        notes[index] = out.note(_step(index))
    if len(notes) < len(order):
        _run_rest(model, order, tokens, notes, out)
    return {
        index: LayerStatistics.parse(note, source.layers[index], "the stopped run")
        for index, note in notes.items()
        if note is not None
    }


def _run_rest(
    model: StreamedModel,
    order: Sequence[int],
    tokens: Tensor,
    notes: dict[int, Any],
    out: StagedCheckpoint | None,
) -> None:
    """Runs the layers that follow those which `notes` has, and adds theirs."""
    done = len(notes)
    state = out.read_state() if out is not None and done else None
    hidden = model.embed(tokens) if state is None else state["hidden"]

    def keep(layer: StreamedLayer, note: Any) -> None:
        notes[layer.index] = note
        if out is not None:
            out.record(_step(layer.index), note, {"hidden": hidden})
        bar.update()

    with progress_bar(len(order), "layer", "reading text", done=done) as bar:
        for layer in model.layers(first=done):
            keep(layer, _measure(layer, hidden))
        for index in order[max(done, model.num_layers) :]:
            hidden = hidden[:, :-1]  # nothing follows the last token
            draft = model.draft_layer(index)
            keep(draft, _measure(draft, hidden, tokens[:, -hidden.shape[1] :]))


def _step(layer: int) -> str:
    return f"statistics-{layer}"


def _measure(
    layer: StreamedLayer, hidden: Tensor, *following: Tensor
) -> dict[str, Any] | None:
    """Takes hidden states through a layer, in place.

    Args:
        layer: The layer.
        hidden: `[B, T, H]`.
        following: For a draft layer: the token after each `[B, T]`.

    Returns:
        The statistics of its routed experts as JSON, if it has some.

    Raises:
        TensorError: The layer's outputs are not finite.
    """
    watch = None
    if layer.moe is not None:
        watch = layer.moe.observer = _Watch(len(layer.moe))
    windows = max(_BATCH_TOKENS // hidden.shape[1], 1)
    norms = 0.0
    for parts in zip(*(of.split(windows) for of in (hidden, *following))):
        parts[0].copy_(layer(*parts))
        norms += float(parts[0].norm(dim=-1).double().sum())
    if not math.isfinite(norms):
        raise TensorError(
            f"{layer.name}: gives infinities or NaN on the text; one of its weights is "
            "damaged: fetch its file again"
        )
    if watch is None:
        return None
    tokens = hidden.shape[0] * hidden.shape[1]
    return {
        "tokens": tokens,
        "chosen": watch.chosen,
        "added": watch.added,
        "stream": norms / tokens,
    }
