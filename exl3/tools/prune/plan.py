# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What is to be pruned, by the command's options, and which experts stay."""

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3.checkpoint.layers import count_field
from exl3.checkpoint.plan import text_config
from exl3.format.errors import FileError
from exl3.tools.prune.allocation import Kept, Scores
from exl3.tools.prune.budget import Budget
from exl3.tools.prune.layers import Source
from exl3.tools.prune.record import read_profile
from exl3.tools.prune.statistics import (
    SALIENCIES,
    LayerStatistics,
    as_json,
    read_statistics,
)
from exl3.tools.shared import durable
from exl3.tools.shared.errors import ToolError

if TYPE_CHECKING:
    from torch import Tensor

    from exl3.tools.shared.staging import StagedCheckpoint

#: Tokens of a window of text, if the model reads as many.
WINDOW = 512
#: The options that decide which experts stay.
_DECISIVE = (
    "keep_ratio",
    "target_size",
    "widths",
    "profile",
    "floor",
    "mtp_keep_ratio",
    "mtp_widths",
    "saliency",
    "text",
    "tokens",
    "statistics",
)


@dataclass(frozen=True)
class Choice:
    """Which experts stay, and why.

    Attributes:
        kept: Of every layer that has routed experts.
        scores: What each expert is worth; none if a profile chose.
        tokens: Tokens of text that the scores come from; 0 without.
    """

    kept: Kept
    scores: Scores
    tokens: int


class Plan:
    """Chooses the experts that stay, by the command's options.

    Attributes:
        request: The options that decide, files by their contents.

    Args:
        options: The command's options.
        source: The checkpoint.

    Raises:
        ToolError: Options contradict each other, or ask for what cannot be.
    """

    def __init__(self, options: argparse.Namespace, source: Source):
        _check_options(options, source)
        self._options = options
        self._source = source
        self.request: dict[str, Any] = {
            "command": "prune",
            **{_flag(name): _plain(getattr(options, name)) for name in _DECISIVE},
        }
        self._trunk = Budget(
            option=_flag(
                "keep_ratio"
                if options.keep_ratio is not None
                else "widths"
                if options.widths is not None
                else "target_size"
            ),
            keep_ratio=options.keep_ratio,
            target_bytes=options.target_size,
            widths=options.widths,
            floor=options.floor,
        )
        self._draft = None
        ratio, widths = options.mtp_keep_ratio, options.mtp_widths
        if ratio is not None or widths is not None:
            self._draft = Budget(
                option=_flag("mtp_widths" if ratio is None else "mtp_keep_ratio"),
                keep_ratio=ratio,
                widths=widths,
            )
        if options.profile is None:
            # What no statistics can help is told before hours are spent on them.
            self._share({at.index: [0.0] * at.width for at in source.layers.values()})

    @property
    def record(self) -> dict[str, Any]:
        """The options that were given and decide, for the record."""
        return {
            name: value
            for name, value in self.request.items()
            if value is not None and name != "command"
        }

    def choose(self, out: "StagedCheckpoint | None") -> Choice:
        """Reads or gathers statistics, and chooses.

        Args:
            out: Where gathered statistics are kept, for a run that goes on from there.

        Raises:
            CheckpointError: The model cannot be run.
            ToolError: A file is malformed, or of another checkpoint.
        """
        if self._options.profile is not None:
            return Choice(read_profile(self._options.profile, self._source), {}, 0)
        statistics = self._statistics(out)
        if self._options.save_statistics is not None:
            file = self._options.save_statistics
            temporary = file.with_name(f".{file.name}.unfinished")
            durable.write_json(file, as_json(statistics), temporary)
        saliency = SALIENCIES[self._options.saliency]
        scores = {index: saliency(of) for index, of in statistics.items()}
        tokens = max((of.tokens for of in statistics.values()), default=0)
        return Choice(self._share(scores), scores, tokens)

    def _share(self, scores: Scores) -> Kept:
        drafts = self._source.of_kind(is_draft=True)
        kept: Kept = {layer.index: tuple(range(layer.width)) for layer in drafts}
        if self._draft is not None:
            for layer in drafts:
                if layer.index not in scores:
                    raise ToolError(
                        f"{self._draft.option}: there are no statistics of the MTP "
                        f"layer {layer.index}; gather them with --text"
                    )
            kept = self._draft.share(self._source, drafts, scores, {})
        trunk = self._source.of_kind(is_draft=False)
        kept |= self._trunk.share(self._source, trunk, scores, kept)
        return kept

    def _statistics(self, out: "StagedCheckpoint | None") -> dict[int, LayerStatistics]:
        options, source = self._options, self._source
        if options.statistics is not None:
            return read_statistics(options.statistics, list(source.layers.values()))
        from exl3.tools.prune.gather import gather_statistics

        tokens = _read_windows(source, options.text, options.tokens)
        return gather_statistics(source, tokens, out)


def _read_windows(source: Source, file: Path, limit: int) -> "Tensor":
    """A text's first tokens, in windows that the model can read: `[windows, tokens]`.

    Raises:
        CheckpointError: The tokenizer is missing, or is another model's.
        ToolError: The text cannot be read.
    """
    from exl3.tools.shared.text import TOKENIZER_FILE, tokenize

    config = text_config(source.config)
    tokens = tokenize(source.folder, file).tokens[:limit]
    vocabulary, largest = count_field(config, "vocab_size"), int(tokens.max())
    if largest >= vocabulary:
        raise FileError(
            f"{TOKENIZER_FILE}: gives the text a token {largest}, and config.json has "
            f"a vocab_size of {vocabulary}; use the tokenizer of this checkpoint"
        )
    longest = count_field(config, "max_position_embeddings", WINDOW)
    window = max(min(WINDOW, longest, len(tokens)), 2)  # a draft sees one less
    count = len(tokens) // window
    return tokens[: count * window].view(count, window)


def _check_options(options: argparse.Namespace, source: Source) -> None:
    """Refuses options that contradict each other, or that would do nothing."""

    def refuse(given: tuple[str, ...], beside: str, why: str) -> None:
        for name in given:
            if getattr(options, name) is not None:
                raise ToolError(f"{_flag(name)}: {beside} {why}; leave one of them out")

    draft = ("mtp_keep_ratio", "mtp_widths")
    if options.profile is not None:
        chosen = ("text", "statistics", "save_statistics", "floor", *draft)
        refuse(chosen, "--profile", "names the experts of all layers itself")
        return
    if options.widths is not None:
        refuse(("floor",), "--widths", "says the width of every layer")
    if options.statistics is not None:
        refuse(("text",), "--statistics", "takes the place of a text")
    elif options.text is None:
        raise ToolError(
            "--text: is needed, to see what each expert does; name a file of text like "
            "what the model is used for, or one of --statistics"
        )
    if not source.of_kind(is_draft=True):
        refuse(draft, str(source.folder), "has no MTP layer with routed experts")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain(value: Any) -> Any:
    """An option as JSON; of a file, what tells its content from another."""
    if isinstance(value, Path):
        return f"{value.name} {hashlib.sha256(value.read_bytes()).hexdigest()[:16]}"
    return value
