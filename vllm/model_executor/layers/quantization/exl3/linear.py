# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""EXL3 linear layers: what a rank holds of each matrix, and how it is filled.

A layer of vLLM may be made of several stored matrices (`qkv_proj`), or be cut out of
one (`gate_up_proj` stored as such). Each of its outputs is a shard with its own
scales, bits and codebook. Ranks cut inputs and outputs wherever upstream does; a rank
holds the blocks of 128 that its part touches, and the op leaves out the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from exl3 import ops
from exl3.checkpoint.matrix import Matrix
from exl3.checkpoint.ranks import Blocks, blocks_around
from exl3.format.constants import TILE, padded
from exl3.format.errors import TensorError
from vllm import envs
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.exl3.tensors import (
    INPUT,
    MARKER,
    PARTS,
    TRELLIS,
    check_marker,
    check_trellis,
    scales,
    trellis_shape,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


@dataclass(frozen=True)
class Shard:
    """One output of a layer: a range of the columns of one stored matrix."""

    module: str  # the matrix's name in the checkpoint
    matrix: Matrix
    blocks: Blocks  # what this rank holds of its columns
    words: slice  # its part of the layer's trellises
    columns: slice  # its part of the layer's svh


class Exl3LinearMethod(LinearMethodBase):
    """Runs a linear layer or a head on trellis weights.

    Args:
        prefix: The layer's name in the model.
        matrices: What it is made of, by the checkpoint's names, in order.
    """

    def __init__(self, prefix: str, matrices: Mapping[str, Matrix]):
        self.prefix = prefix
        self.matrices = matrices
        self.shards: list[Shard] = []
        #: Five integers for each shard, as the op `linear` takes them.
        self.layout: list[int] = []
        #: Rows of the first block that belong to the rank before.
        self.lead = 0
        #: The op's, on CUDA.
        self.workspace = 0
        #: Out-features of each matrix, without padding.
        self.out_features: dict[str, int] = {}
        self._rows = Blocks(0, 0, 0, 0)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Allocates the layer's tensors, once and in their final layout.

        Raises:
            TensorError: A matrix has another size than the model.
        """
        rows = self._rows_of(layer, input_size_per_partition, input_size)
        self._rows, self.lead = rows, rows.skip
        held = rows.stop - rows.start
        words = columns = 0
        for module, matrix, blocks in self._columns_of(layer, output_partition_sizes):
            size = blocks.stop - blocks.start
            trellis = size * held // TILE**2 * matrix.words
            self.shards.append(
                Shard(
                    module,
                    matrix,
                    blocks,
                    slice(words, words + trellis),
                    slice(columns, columns + size),
                )
            )
            self.layout += [size, blocks.skip, blocks.keep]
            self.layout += [matrix.words, int(matrix.codebook)]
            words += trellis
            columns += size
        # MLA asks a layer for its weight's device by one of a few names; this is one.
        layer.weight_packed = _parameter(words, torch.int16)
        layer.suh = _parameter((len(self.shards), held), torch.float16)
        layer.svh = _parameter(columns, torch.float16)
        layer.input_size_per_partition = input_size_per_partition

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x times the layer's weights.

        Args:
            layer: The layer.
            x: [..., input size of this rank].
            bias: [output size of this rank], or None.
        """
        if self.lead:
            x = functional.pad(x, (self.lead, 0))
        return ops.linear(
            x,
            layer.weight_packed,
            layer.suh,
            layer.svh,
            bias,
            self.layout,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            workspace=self.workspace,
        )

    def load(
        self, layer: nn.Module, module: str, field: str, tensor: torch.Tensor
    ) -> None:
        """Copies one stored tensor to its place.

        Args:
            layer: The layer.
            module: The matrix that it belongs to, by the checkpoint's name.
            field: The last part of its name, but not `bias`.
            tensor: As it is stored. Its memory is free for reuse afterwards.
        """
        matrix, name = self.matrices[module], f"{module}.{field}"
        part = PARTS[field]
        if part == MARKER:
            check_marker(tensor, matrix.codebook, name)
            return
        rows = slice(self._rows.start, self._rows.stop)
        if part == TRELLIS:
            check_trellis(tensor, trellis_shape(matrix), name)
            tensor = tensor[rows.start // TILE : rows.stop // TILE]
        elif part == INPUT:
            tensor = scales(tensor, field, matrix.in_features, name)[rows]
        else:
            tensor = scales(tensor, field, matrix.out_features, name)
        for index, shard in enumerate(self.shards):
            if shard.module != module:
                continue
            start, stop = shard.blocks.start, shard.blocks.stop
            if part == TRELLIS:
                strips = tensor[:, start // TILE : stop // TILE].transpose(0, 1)
                layer.weight_packed.data[shard.words].view(strips.shape).copy_(strips)
            elif part == INPUT:
                layer.suh.data[index].copy_(tensor)
            else:
                layer.svh.data[shard.columns].copy_(tensor[start:stop])

    def _rows_of(self, layer: nn.Module, part: int, size: int) -> Blocks:
        """The rows that this rank holds."""
        for module, matrix in self.matrices.items():
            if matrix.in_features != padded(size):
                raise TensorError(
                    f"{module}.trellis: {matrix.in_features} in-features are stored, "
                    f"and the config's {self.prefix} has {size}, which are stored as "
                    f"{padded(size)}; is this the config of another model?"
                )
        rank = layer.tp_rank if isinstance(layer, RowParallelLinear) else 0
        return blocks_around(rank * part, (rank + 1) * part, padded(size))

    def _columns_of(
        self, layer: nn.Module, parts: list[int]
    ) -> Iterator[tuple[str, Matrix, Blocks]]:
        """What this rank holds of each output: the matrix, and its columns."""
        sizes, starts = zip(*_outputs(layer, parts), strict=True)
        for module, matrix, outputs in self._spread(sizes):
            before = 0
            for index in outputs:
                start = before + starts[index]
                stop = start + parts[index]
                yield module, matrix, blocks_around(start, stop, matrix.out_features)
                before += sizes[index]

    def _spread(self, sizes: Sequence[int]) -> Iterator[tuple[str, Matrix, range]]:
        """Which outputs each matrix holds: one, or several that follow one another.

        Args:
            sizes: Out-features of each whole output.
        """
        first = 0
        for module, matrix in self.matrices.items():
            last = first + 1
            if len(self.matrices) < len(sizes):
                while last < len(sizes) and (
                    padded(sum(sizes[first:last])) < matrix.out_features
                ):
                    last += 1
            total = sum(sizes[first:last])
            if padded(total) != matrix.out_features:
                raise TensorError(
                    f"{module}.trellis: {matrix.out_features} out-features are stored, "
                    f"and the config's {self.prefix} has {total}, which are stored as "
                    f"{padded(total)}; is this the config of another model?"
                )
            self.out_features[module] = total
            yield module, matrix, range(first, last)
            first = last
        if first != len(sizes):
            raise TensorError(
                f"{self.prefix}: has {len(sizes)} outputs, and {list(self.matrices)} "
                f"are {first} of them; is this the config of another model?"
            )


def _outputs(layer: nn.Module, parts: list[int]) -> Iterator[tuple[int, int]]:
    """The size of each whole output, and where this rank's part of it starts."""
    if isinstance(layer, ParallelLMHead):
        if layer.num_added_embeddings:
            raise ValueError(f"{layer.prefix}: EXL3 heads take no added vocabulary")
        yield layer.org_vocab_size, layer.tp_rank * parts[0]
        return
    column = isinstance(layer, ColumnParallelLinear)
    for index, part in enumerate(parts):
        size, rank = (layer.tp_size, layer.tp_rank) if column else (1, 0)
        if isinstance(layer, QKVParallelLinear) and index:
            # A head of keys and values may serve several ranks.
            replicas = layer.num_kv_head_replicas
            size, rank = size // replicas, rank // replicas
        yield part * size, rank * part


def _parameter(shape: int | tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
