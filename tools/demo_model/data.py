# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The demo text as token ids: training windows and held-out chapters."""

from bisect import bisect_right
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model import corpus
from tools.demo_model.files import CORPUS_FILE, TOKENIZER_FILE, made
from tools.demo_model.tokenizer import EOS_ID


class Data:
    """Token ids of both splits.

    Attributes:
        stream: All training chapters in order, each after an end-of-text token.
        verses: Every training verse as a text of its own, without the space that
            parts it from the verse before.
        ends: Where each verse ends in `stream`.
        heldout: The held-out chapters, each between two end-of-text tokens.
        heldout_bytes: UTF-8 bytes of the held-out chapters.
    """

    def __init__(self, work_dir: Path):
        self.tokenizer = Tokenizer.from_file(str(made(work_dir, TOKENIZER_FILE)))
        train, heldout = corpus.split(corpus.read_chapters(made(work_dir, CORPUS_FILE)))
        self.heldout = []
        self.heldout_bytes = 0
        for chapter in heldout:
            text = corpus.running_text(chapter)
            self.heldout_bytes += len(text.encode())
            ids = self.tokenizer.encode(text).ids
            self.heldout.append(torch.tensor([EOS_ID, *ids, EOS_ID]))
        stream: list[int] = []
        self.verses: list[list[int]] = []
        self.ends: list[int] = []
        for chapter in train:
            stream.append(EOS_ID)
            # Merges never cross a space, so encoding verse by verse gives the
            # tokens of the whole chapter.
            for index, verse in enumerate(chapter):
                inner = verse if index == 0 else " " + verse
                stream += self.tokenizer.encode(inner).ids
                self.verses.append(self.tokenizer.encode(verse).ids)
                self.ends.append(len(stream))
        stream.append(EOS_ID)
        self.stream = torch.tensor(stream)

    def windows(self, seed: int, step: int, batch: int, length: int) -> Tensor:
        """The windows of one step `[batch, length]`, each from a verse's start.

        A window starts as a prompt does: without a space or an end-of-text token.

        Args:
            seed: Seed of the run.
            step: Step of the run; with the seed it decides the choice.
            batch: Number of windows.
            length: Tokens of a window.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        usable = bisect_right(self.ends, len(self.stream) - length)
        chosen = torch.randint(usable, (batch,), generator=generator).tolist()
        rows = []
        for verse in chosen:
            head = torch.tensor(self.verses[verse])
            tail = self.stream[self.ends[verse] : self.ends[verse] + length]
            rows.append(torch.cat([head, tail])[:length])
        return torch.stack(rows)
