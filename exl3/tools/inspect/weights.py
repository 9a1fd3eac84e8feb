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
    MAX_SIZE,
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
from exl3.format.names import SHARED_WITH_TARGET, STACKS, layer_of
from exl3.tools.inspect.kv_cache import has_indexer

#: EXL3 modules that vLLM builds dense, and so holds decoded.
DECODED = {"gate", "eh_proj", "wk", "weights_proj"}
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
        self._heads = kv_heads(self._text)
        self._vocabulary = padded_vocabulary(self._text)
        self._trunk, self._draft = _Modules(), _Modules()
        plan, modules = found.checkpoint.plan, found.modules
        for module, matrix in plan.linears.items():
            if self._is_held(module):
                self._add_linear(module, matrix)
        tied = self._text.get("tie_word_embeddings") is True
        for name, layer in plan.experts.items():
            self._of(name).experts.append((name, layer))
        for module, fields in modules.dense.items():
            if self._is_held(module) and not (tied and module == "lm_head"):
                for name, header in fields.items():
                    if not plan.is_superseded(header.name):
                        self._add_dense(module, name, header)
        for name, slices in modules.dense_experts.items():
            for part in slices:
                for header in part.fields.values():
                    self._of(name).dense[header.num_bytes, MAX_SIZE] += 1

    def on(self, size: int) -> Weights:
        """What the fullest of so many ranks holds.

        Args:
            size: A tensor-parallel size that fits the checkpoint.
        """
        trunk, draft = self._trunk.common(size), self._draft.common(size)
        ranks = [
            Weights(
                trunk + self._trunk.of_linears(size, rank, self._vocabulary),
                draft + self._draft.of_linears(size, rank, self._vocabulary),
            )
            for rank in range(size)
        ]
        return max(ranks, key=lambda weights: weights.trunk + weights.draft)

    def _of(self, module: str) -> "_Modules":
        return self._draft if self._is_draft(module) else self._trunk

    def _is_draft(self, module: str) -> bool:
        layer = layer_of(module, self._num_layers)
        return layer is not None and layer >= self._num_layers

    def _is_held(self, module: str) -> bool:
        """Whether a server holds a module of its own."""
        if self._is_draft(module):
            return not module.endswith(SHARED_WITH_TARGET)
        layer = layer_of(module, self._num_layers)
        if layer is None or ".indexer." not in module:
            return True
        return has_indexer(self._text, layer, self._num_layers)

    def _add_linear(self, module: str, matrix: Matrix) -> None:
        held, name = self._of(module), module.rpartition(".")[2]
        decoded = _BF16 * matrix.in_features * matrix.out_features
        if name in DECODED:
            held.dense[decoded, 1] += 1
            return
        if name == "kv_b_proj":  # MLA decodes it once more, for its products
            held.dense[decoded, MAX_SIZE] += 1
        held.linears[matrix, cut_of(module), most_parts(module, self._heads)] += 1

    def _add_dense(self, module: str, name: str, header: TensorHeader) -> None:
        cut, num_bytes = cut_of(module), header.num_bytes
        if cut is Cut.WHOLE and name not in STACKS:
            parts = 1
        elif cut is Cut.ROWS and len(header.shape) < 2:
            parts = 1  # a bias of the sum
        else:
            parts = most_parts(module, self._heads)
        tokens = header.shape[:1]
        if cut is Cut.VOCABULARY and self._vocabulary and tokens > (0,):
            num_bytes = num_bytes // tokens[0] * self._vocabulary
        self._of(module).dense[num_bytes, parts] += 1


class _Modules:
    """The modules of a trunk or of its drafts. Layers are alike, so few differ."""

    def __init__(self) -> None:
        self.linears: Counter[tuple[Matrix, Cut, int]] = Counter()  # most parts
        self.dense: Counter[tuple[int, int]] = Counter()  # bytes and most parts
        self.experts: list[tuple[str, ExpertLayer]] = []

    def common(self, size: int) -> int:
        """Bytes of what every one of so many ranks holds as much of."""
        dense = sum(
            count * -(-num_bytes // min(size, most))
            for (num_bytes, most), count in self.dense.items()
        )
        return dense + sum(expert_bytes(it, name, size) for name, it in self.experts)

    def of_linears(self, size: int, rank: int, vocabulary: int | None) -> int:
        """Bytes that a rank holds of the EXL3 linear layers."""
        total = 0
        for (matrix, cut, most), count in self.linears.items():
            k, n = matrix.in_features, matrix.out_features
            rows, columns = blocks_around(0, k, k), blocks_around(0, n, n)
            parts = min(size, most)
            part = rank // (size // parts)  # several ranks may hold the same heads
            if cut is Cut.ROWS:
                rows = _part(k, k, parts, part)
            elif cut is Cut.COLUMNS:
                columns = _part(n, n, parts, part)
            elif cut is Cut.VOCABULARY:
                columns = _part(vocabulary or n, n, parts, part)
            total += count * linear_bytes(matrix, rows, columns)
        return total


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
