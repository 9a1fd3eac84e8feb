# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Bytes of weights that each GPU holds, by the cuts of `exl3.checkpoint.ranks`.

That is more than the checkpoint's bytes over the number of GPUs: some modules are whole
on every one, and a block that two ranks touch is held by both.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exl3.checkpoint.agreement import decoder_layers
from exl3.checkpoint.experts import ExpertLayer
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.matrix import Matrix
from exl3.checkpoint.plan import Survey, text_config
from exl3.checkpoint.ranks import (
    Blocks,
    Cut,
    blocks_around,
    cut_of,
    expert_part,
    kv_heads,
    most_parts,
    padded_vocabulary,
)
from exl3.format.constants import TILE
from exl3.format.names import STACKS, layer_of
from exl3.tools.inspect.kv_cache import has_indexer

#: EXL3 modules that vLLM builds dense, and so holds decoded.
DECODED = {"gate", "eh_proj", "wk", "weights_proj"}
#: What a draft has from its target, whether or not it is stored with it.
_SHARED_WITH_TARGET = ("embed_tokens", "shared_head.head")
_BF16 = 2
#: Bytes of a row of the table that tells where an expert's matrices are.
_LAYOUT_ROW = 3 * 3 * 8


@dataclass(frozen=True)
class Weights:
    """Bytes of weights on the GPU that holds most."""

    trunk: int
    draft: int


class RankWeights:
    """Adds up what ranks hold of a checkpoint.

    Args:
        found: What is stored.
        config: Its `config.json`.
    """

    def __init__(self, found: Survey, config: Mapping[str, Any]):
        self._text = text_config(config)
        self._num_layers = decoder_layers(self._text)
        self._plan = found.checkpoint.plan
        self._heads = kv_heads(self._text)
        # Layers are alike, so there are few different matrices.
        self._linears: Counter[tuple[bool, Matrix, Cut, int]] = Counter()
        self._decoded = {True: 0, False: 0}
        self._absorbed = {True: 0, False: 0}
        self._dense: Counter[tuple[bool, int, Cut]] = Counter()
        for module, matrix in self._plan.linears.items():
            if self._is_held(module):
                self._add_linear(module, matrix)
        modules = found.modules
        for module, fields in modules.dense.items():
            if self._is_held(module):
                cut, is_draft = cut_of(module), self._is_draft(module)
                for name, header in fields.items():
                    self._add_dense(module, name, header, cut, is_draft)
        for slices in modules.dense_experts.values():
            for part in slices:
                cut = (
                    Cut.ROWS if part.projection in ("down_proj", "w2") else Cut.COLUMNS
                )
                for header in part.fields.values():
                    is_draft = self._is_draft(header.name)
                    self._dense[is_draft, header.num_bytes, cut] += 1

    def on(self, size: int) -> Weights:
        """What the fullest of so many ranks holds.

        Args:
            size: A tensor-parallel size that fits the checkpoint.
        """
        common = {
            is_draft: self._decoded[is_draft]
            + self._absorbed[is_draft] // size
            + self._experts(size, is_draft)
            + sum(
                count * (num_bytes if cut is Cut.WHOLE else -(-num_bytes // size))
                for (of_draft, num_bytes, cut), count in self._dense.items()
                if of_draft == is_draft
            )
            for is_draft in (False, True)
        }
        ranks = [
            Weights(
                common[False] + self._linear_bytes(size, rank, False),
                common[True] + self._linear_bytes(size, rank, True),
            )
            for rank in range(size)
        ]
        return max(ranks, key=lambda weights: weights.trunk + weights.draft)

    def _is_draft(self, module: str) -> bool:
        layer = layer_of(module, self._num_layers)
        return layer is not None and layer >= self._num_layers

    def _is_held(self, module: str) -> bool:
        """Whether a server holds a module of its own."""
        if self._is_draft(module):
            return not module.endswith(_SHARED_WITH_TARGET)
        if module == "lm_head":
            return self._text.get("tie_word_embeddings") is not True
        layer = layer_of(module, self._num_layers)
        if layer is None or ".indexer." not in module:
            return True
        return has_indexer(self._text, layer, self._num_layers)

    def _add_linear(self, module: str, matrix: Matrix) -> None:
        is_draft, name = self._is_draft(module), module.rpartition(".")[2]
        if name in DECODED:
            self._decoded[is_draft] += _BF16 * matrix.in_features * matrix.out_features
            return
        if name == "kv_b_proj":  # MLA decodes it once more, for its products
            self._absorbed[is_draft] += _BF16 * matrix.in_features * matrix.out_features
        most = most_parts(module, self._heads)
        self._linears[is_draft, matrix, cut_of(module), most] += 1

    def _add_dense(
        self, module: str, name: str, header: TensorHeader, cut: Cut, is_draft: bool
    ) -> None:
        if self._plan.is_superseded(header.name):
            return
        num_bytes = header.num_bytes
        if name in STACKS:
            cut = Cut.COLUMNS
        elif cut is Cut.ROWS and len(header.shape) < 2:
            cut = Cut.WHOLE  # a bias of the sum
        vocabulary, tokens = padded_vocabulary(self._text), header.shape[:1]
        if cut is Cut.VOCABULARY and vocabulary and tokens > (0,):
            num_bytes = num_bytes // tokens[0] * vocabulary
        self._dense[is_draft, num_bytes, cut] += 1

    def _experts(self, size: int, is_draft: bool) -> int:
        return sum(
            expert_bytes(layer, name, size)
            for name, layer in self._plan.experts.items()
            if self._is_draft(name) == is_draft
        )

    def _linear_bytes(self, size: int, rank: int, is_draft: bool) -> int:
        return sum(
            count * self._one_linear(matrix, cut, size, rank, most)
            for (of_draft, matrix, cut, most), count in self._linears.items()
            if of_draft == is_draft
        )

    def _one_linear(
        self, matrix: Matrix, cut: Cut, size: int, rank: int, most: int
    ) -> int:
        if most < size:  # a head of keys and values on several ranks
            rank, size = rank // (size // most), most
        rows, columns = matrix.in_features, matrix.out_features
        held_rows, held = (
            blocks_around(0, rows, rows),
            blocks_around(0, columns, columns),
        )
        if cut is Cut.ROWS:
            held_rows = _part(rows, rows, size, rank)
        elif cut is Cut.COLUMNS:
            held = _part(columns, columns, size, rank)
        elif cut is Cut.VOCABULARY:
            held = _part(padded_vocabulary(self._text) or columns, columns, size, rank)
        return linear_bytes(matrix, held_rows, held)


def _part(features: int, stored: int, size: int, rank: int) -> Blocks:
    return blocks_around(features * rank // size, features * (rank + 1) // size, stored)


def linear_bytes(matrix: Matrix, rows: Blocks, columns: Blocks) -> int:
    """Bytes that a rank holds of an EXL3 linear layer.

    Args:
        matrix: The layer.
        rows: What the rank holds of its in-features.
        columns: And of its out-features.
    """
    k, n = rows.stop - rows.start, columns.stop - columns.start
    bias = columns.keep if matrix.has_bias else 0
    return 2 * (k * n // TILE**2 * matrix.words + k + n + bias)


def expert_bytes(layer: ExpertLayer, name: str, size: int) -> int:
    """Bytes that each of so many ranks holds of the routed experts of a layer.

    Args:
        layer: The experts as stored.
        name: The layer's name.
        size: A tensor-parallel size that fits them.
    """
    part = expert_part(layer, name, size, 0)
    virtual = layer.width * len(part.slices)
    tiles = layer.hidden * part.intermediate // TILE**2 * len(part.slices)
    words = sum(code.words for codes in layer.encodings for code in codes)
    # What experts share is held for each of them.
    vectors = virtual * 3 * (layer.hidden + part.intermediate)
    return 2 * (tiles * words + vectors) + virtual * _LAYOUT_ROW
