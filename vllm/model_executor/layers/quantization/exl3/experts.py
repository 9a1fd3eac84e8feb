# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""EXL3 routed experts: the slabs of a layer, and how they are filled.

An expert that is stored in slices is run as that many virtual experts, which are
chosen together with the same weight. That is exact, since the activation works on
each intermediate feature by itself. A rank holds some of the slices, or a part of one.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from exl3 import ops
from exl3.checkpoint.experts import ExpertLayer
from exl3.checkpoint.ranks import expert_part
from exl3.format.constants import TILE, Codebook, padded
from exl3.format.errors import TensorError
from exl3.format.names import PROJECTIONS, SHARED_H
from vllm import envs
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.exl3.tensors import (
    INPUT,
    MARKER,
    OUTPUT,
    PARTS,
    TRELLIS,
    Arrivals,
    check_marker,
    check_trellis,
    needed_parts,
    scales,
)
from vllm.refusal import RefusedOptionError


class ExpertMatrix(NamedTuple):
    """One stored matrix of the experts of a layer."""

    experts: str  # the layer's experts, by the checkpoint's name
    expert: int | None  # None: what all of them share
    projection: str  # "gate", "up" or "down"
    rank: int  # the slice; 0 where experts are stored whole


class Exl3ExpertsMethod(FusedMoEMethodBase):
    """Runs the routed experts of one layer on trellis weights.

    Args:
        moe: The layer's config.
        name: The experts' name in the checkpoint.
        stored: How they are stored.
    """

    def __init__(self, moe: FusedMoEConfig, name: str, stored: ExpertLayer):
        super().__init__(moe)
        self.name = name
        self.stored = stored
        parallel = moe.moe_parallel_config
        self.part = expert_part(stored, name, parallel.tp_size, parallel.tp_rank)
        #: [virtual expert][gate, up, down]: where its trellis starts in its slab, the
        #: words of a tile and the codebook, as the op `moe` takes them.
        self._layout: list[list[list[int]]] = []
        self._local: dict[int, int] = {}  # local index of each expert of this rank
        #: The op's, on CUDA.
        self.workspace = 0

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Allocates the layer's slabs, once and in their final layout.

        Raises:
            TensorError: The experts have another size than the model.
            RefusedOptionError: The layer needs what the op cannot do.
        """
        self._refuse_unsupported(layer)
        self._check_sizes(layer, hidden_size)
        for expert in range(self.stored.width):
            index = layer._map_global_expert_id_to_local_expert_id(expert)
            if index != -1:
                self._local[expert] = index
        hidden, size = self.stored.hidden, self.part.intermediate
        virtual = num_experts * len(self.part.slices)
        up, down = self._lay_out(virtual)
        layer.w13_trellis = _parameter(up, torch.int16)
        layer.w2_trellis = _parameter(down, torch.int16)
        layer.w13_suh = _parameter((virtual, 2, hidden), torch.float16)
        layer.w13_svh = _parameter((virtual, 2, size), torch.float16)
        layer.w2_suh = _parameter((virtual, size), torch.float16)
        layer.w2_svh = _parameter((virtual, hidden), torch.float16)
        layer.register_buffer(
            "exl3_layout", torch.tensor(self._layout, dtype=torch.int64), False
        )
        self._limit = math.inf if layer.swiglu_limit is None else layer.swiglu_limit

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: no kernel of upstream's runs these experts."""
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts=None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the weighted sum of the chosen experts that this rank holds.

        Args:
            layer: The layer.
            x: [num_tokens, hidden].
            topk_weights: [num_tokens, top_k].
            topk_ids: Experts, int32 or int64 [num_tokens, top_k].
            shared_experts: Run by the caller.
            shared_experts_input: Not used.
        """
        return ops.moe(
            x,
            topk_ids,
            topk_weights.to(torch.float32),
            layer.w13_trellis,
            layer.w2_trellis,
            layer.exl3_layout,
            layer.w13_suh,
            layer.w13_svh,
            layer.w2_suh,
            layer.w2_svh,
            len(self.part.slices),
            layer.expert_map,
            "silu",
            self._limit,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            workspace=self.workspace,
        )

    def holds(self, matrix: ExpertMatrix) -> bool:
        """Whether this rank holds any of a matrix."""
        local = matrix.expert is None or matrix.expert in self._local
        return local and matrix.rank in self.part.slices

    def missing(self, arrivals: Arrivals) -> Iterator[str]:
        """The tensors of this rank's experts that did not arrive."""
        shared = [None] if self.stored.shared_h else []
        for expert in [*self._local, *shared]:
            for rank in self.part.slices:
                for projection in PROJECTIONS:
                    matrix = ExpertMatrix(self.name, expert, projection, rank)
                    codebook, needed = self._needed(matrix)
                    for field in arrivals.missing(matrix, needed, codebook):
                        yield self._tensor_name(matrix, field)

    def load(
        self,
        layer: RoutedExperts,
        matrix: ExpertMatrix,
        field: str,
        tensor: torch.Tensor,
    ) -> None:
        """Copies one stored tensor of a matrix that this rank holds to its place.

        Args:
            layer: The layer.
            matrix: What the tensor belongs to.
            field: The last part of its name.
            tensor: As it is stored. Its memory is free for reuse afterwards.
        """
        name = self._tensor_name(matrix, field)
        code, down = PROJECTIONS.index(matrix.projection), matrix.projection == "down"
        experts = (
            self._local.values()
            if matrix.expert is None
            else [self._local[matrix.expert]]
        )
        slice_ = matrix.rank - self.part.slices.start
        virtual = [expert * len(self.part.slices) + slice_ for expert in experts]
        part, (k, n) = PARTS[field], self.stored.shape(matrix.projection)
        if part == MARKER:
            check_marker(tensor, self._needed(matrix)[0], name)
        elif part == TRELLIS:
            start, words, _ = self._layout[virtual[0]][code]
            check_trellis(tensor, (k // TILE, n // TILE, words), name)
            tiles = slice(self.part.start // TILE, self.part.stop // TILE)
            strips = (tensor[tiles] if down else tensor[:, tiles]).transpose(0, 1)
            slab = layer.w2_trellis if down else layer.w13_trellis
            place = slab.data[start : start + strips.numel()]
            place.view(strips.shape).copy_(strips)
        else:
            vector = scales(tensor, field, k if part == INPUT else n, name)
            if down == (part == INPUT):  # the intermediate side
                vector = vector if down else self._without_padding(vector)
                vector = vector[self.part.start : self.part.stop]
            if down:
                target = layer.w2_suh if part == INPUT else layer.w2_svh
            else:
                target = layer.w13_suh if part == INPUT else layer.w13_svh
                target = target[:, code]
            target.data[virtual] = vector.to(target.device)

    def _needed(self, matrix: ExpertMatrix) -> tuple[Codebook, int]:
        """The codebook of a matrix, and the parts that are stored of it."""
        hidden_side = OUTPUT if matrix.projection == "down" else INPUT
        if matrix.expert is None:
            return Codebook.INST3, hidden_side
        code = PROJECTIONS.index(matrix.projection)
        codebook = self.stored.encodings[matrix.expert][code].codebook
        needed = needed_parts(codebook)
        return codebook, needed & ~hidden_side if self.stored.shared_h else needed

    def _tensor_name(self, matrix: ExpertMatrix, field: str) -> str:
        expert = SHARED_H if matrix.expert is None else matrix.expert
        spelling = self.stored.spelling[PROJECTIONS.index(matrix.projection)]
        rank = f".rank{matrix.rank}" if self.stored.sliced else ""
        return f"{self.name}.{expert}.{spelling}{rank}.{field}"

    def _lay_out(self, virtual: int) -> tuple[int, int]:
        """Places the matrices of all virtual experts one after another.

        Args:
            virtual: Their number.

        Returns:
            int16 words of the slab of gate and up, and of that of down.
        """
        tiles = self.stored.hidden * self.part.intermediate // TILE**2
        ends = [0, 0]
        self._layout = [[[0, 0, 0] for _ in PROJECTIONS] for _ in range(virtual)]
        for expert, index in self._local.items():
            for slice_ in range(len(self.part.slices)):
                row = self._layout[index * len(self.part.slices) + slice_]
                for code, encoding in enumerate(self.stored.encodings[expert]):
                    slab = PROJECTIONS[code] == "down"
                    row[code] = [ends[slab], encoding.words, int(encoding.codebook)]
                    ends[slab] += tiles * encoding.words
        return ends[0], ends[1]

    def _without_padding(self, vector: torch.Tensor) -> torch.Tensor:
        """Zeroes what gate and up give beyond the model's intermediate size.

        Padding features decode to anything in packs of older writers. At zero they
        add nothing, whatever `down` has in their rows.
        """
        size = self.moe.intermediate_size
        if self.stored.sliced or len(vector) == size:
            return vector
        vector = vector.clone()
        vector[size:] = 0
        return vector

    def _check_sizes(self, layer: RoutedExperts, hidden_size: int) -> None:
        """Refuses experts of another size or number than the model's."""
        stored, size = self.stored, self.moe.intermediate_size
        intermediate = stored.ranks * stored.intermediate
        expected = size if stored.sliced else padded(size)
        for what, found, wanted in (
            ("routed experts", stored.width, layer.global_num_experts),
            ("hidden features", stored.hidden, padded(hidden_size)),
            ("intermediate features", intermediate, expected),
        ):
            if found != wanted:
                raise TensorError(
                    f"{self.name}: {found} {what} are stored, and the config's "
                    f"{layer.layer_name} needs {wanted}; is this the config of "
                    "another model?"
                )

    def _refuse_unsupported(self, layer: RoutedExperts) -> None:
        """Refuses what the op cannot do, by name."""
        parallel = self.moe.moe_parallel_config
        unsupported = {
            f"activation {layer.activation.value}": (
                layer.activation != MoEActivation.SILU
            ),
            f"swiglu_alpha {layer.swiglu_alpha}": layer.swiglu_alpha not in (None, 1),
            f"swiglu_beta {layer.swiglu_beta}": layer.swiglu_beta not in (None, 0),
            "biases of experts": self.moe.has_bias,
            "router weights on the input": layer.apply_router_weight_on_input,
            "--enable-eplb": parallel.enable_eplb,
            "--enable-lora on routed experts": self.moe.is_lora_enabled,
            "fused shared experts (set VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0)": (
                layer.expert_map_manager.num_fused_shared_experts > 0
            ),
        }
        used = [what for what, is_used in unsupported.items() if is_used]
        if used:
            raise RefusedOptionError(
                f"{layer.layer_name}: {', '.join(used)}: not supported for EXL3 experts"
            )


def _parameter(shape: int | tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
