# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A checkpoint that runs here."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from exl3.format.errors import TensorError
from exl3.model import StreamedModel
from exl3.tools.compare.measure import Scores
from exl3.tools.shared.progress import progress_bar


class LocalModel:
    """Runs a checkpoint layer by layer, and keeps the last layer's hidden states.

    They take 4 bytes a token and hidden feature; logits are made when asked for.

    Attributes:
        name: The folder.
        folder: The same, as a path.
        longest: Tokens that it reads at once.
        vocabulary: Its `vocab_size`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = str(folder)
        self._model = StreamedModel.open(folder)
        config = self._model.text_config
        self.longest: int = config.get("max_position_embeddings") or 2048
        self.vocabulary: int | None = config["vocab_size"]
        self._hidden: list[Tensor] = []

    def read(self, windows: Sequence[Tensor]) -> None:
        """Runs all layers over windows of token ids, but for their last tokens.

        Raises:
            CheckpointError: A tensor is missing or misshaped, or what a layer gives is
                not finite.
        """
        model = self._model
        hidden = [model.embed(window[None, :-1]) for window in windows]
        with progress_bar(model.num_layers, "layer", self.folder.name) as bar:
            for layer in model.layers():
                for index, states in enumerate(hidden):
                    hidden[index] = layer(states)
                    if not hidden[index].isfinite().all():
                        raise TensorError(
                            f"{self.folder}: {layer.name} gives infinities or NaN on "
                            "the text; fetch the files again, or repair the checkpoint"
                        )
                bar.update()
        self._hidden = hidden

    def scores(self, window: int, begin: int, end: int) -> Scores:
        """What it gives at positions `[begin, end)` of a window."""
        logits = self._model.head(self._hidden[window][0, begin:end])
        return Scores(logits.log_softmax(-1))
