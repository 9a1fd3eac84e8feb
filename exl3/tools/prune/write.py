# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Writes the pruned checkpoint."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from exl3.checkpoint.plan import text_config
from exl3.format.names import layer_of
from exl3.model.tensors import TensorSource
from exl3.tools.prune.allocation import Kept
from exl3.tools.prune.layers import Source
from exl3.tools.prune.metadata import other_files, pruned_config
from exl3.tools.prune.record import RECORD_FILE
from exl3.tools.prune.tensors import Move, moves, shards
from exl3.tools.shared.companions import companions
from exl3.tools.shared.progress import progress_bar
from exl3.tools.shared.staging import StagedCheckpoint

#: A shard is one layer's size within these bounds: it is held in memory.
_LEAST_SHARD, _MOST_SHARD = 1 << 29, 4 << 30


def write_pruned(
    source: Source, kept: Kept, record: Mapping[str, Any], out: StagedCheckpoint
) -> None:
    """Writes the tensors that stay, and all files beside them.

    Args:
        source: The checkpoint.
        kept: The experts that stay, of every layer that has some.
        record: What is to be remembered of the choice.
        out: The folder.

    Raises:
        OSError: A file cannot be written.
    """
    parts = shards(source, kept, _shard_bytes(source))
    tensors = TensorSource.open(source.folder)
    sizes = [sum(move.num_bytes for move in part) for part in parts]
    steps = [f"weights-{number}" for number in range(len(parts))]
    done = sum(size for step, size in zip(steps, sizes) if out.has(step))
    with progress_bar(sum(sizes), "B", "writing", done=done) as bar:
        for step, part, size in zip(steps, parts, sizes):
            if out.has(step):
                continue
            out.write_shard(step, {move.name: _read(tensors, move) for move in part})
            tensors.release()
            bar.update(size)
    changed = {
        "config.json": pruned_config(source, kept),
        RECORD_FILE: record,
        **dict(other_files(source, kept, list(moves(source, kept)))),
    }
    for name, content in changed.items():
        out.write_json(name, content)
    for file in companions(source.folder):
        if file.name not in changed:
            out.copy(file)


def _shard_bytes(source: Source) -> int:
    """Bytes of the largest layer, within bounds."""
    num_layers = text_config(source.config)["num_hidden_layers"]
    sizes: dict[int | None, int] = {}
    for header in source.headers:
        layer = layer_of(header.name, num_layers)
        sizes[layer] = sizes.get(layer, 0) + header.num_bytes
    return min(max(*sizes.values(), _LEAST_SHARD), _MOST_SHARD)


def _read(tensors: TensorSource, move: Move) -> Tensor:
    tensor = tensors.read(move.header.name)
    return tensor if move.rows is None else tensor[list(move.rows)]
