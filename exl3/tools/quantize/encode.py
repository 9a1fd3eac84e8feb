# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""From a linear layer's weight to the tensors of its EXL3 form."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from exl3.codec import quantize_linear
from exl3.format.constants import HADAMARD, TILE, Codebook, padded
from exl3.tools.shared.errors import ToolError


@dataclass(frozen=True)
class Job:
    """One matrix to encode.

    Attributes:
        module: The name that its tensors get, before the last dot; a rank's slice ends
            in `.rank0`.
        weight: As torch stores a linear layer's, `[n, k]`.
        hessian: Second moments of the inputs `[k, k]`; None for no calibration.
        bits: Bits per weight.
        codebook: The trellis's codebook.
    """

    module: str
    weight: Tensor
    hessian: Tensor | None
    bits: int | float
    codebook: Codebook


def slice_job(job: Job, ranks: int, *, by_output: bool) -> Iterator[Job]:
    """Cuts a routed expert's matrix into one job a rank.

    Each slice is encoded by itself, with signs and scales of its own. A slice of the
    outputs has the same inputs, a slice of the inputs has its block of their moments.

    Args:
        job: The whole matrix.
        ranks: Number of slices, of equal size.
        by_output: Whether outputs are cut (gate, up) or inputs (down).

    Raises:
        ValueError: A slice would be no whole number of Hadamard blocks.
    """
    size = job.weight.shape[0 if by_output else 1]
    part, rest = divmod(size, ranks)
    if rest or part % HADAMARD:
        raise ValueError(
            f"{job.module}: {size} features over {ranks} ranks are not whole blocks of "
            f"{HADAMARD}"
        )
    for rank in range(ranks):
        cut = slice(rank * part, (rank + 1) * part)
        weight, hessian = job.weight, job.hessian
        if by_output:
            weight = weight[cut]
        else:
            weight = weight[:, cut]
            hessian = None if hessian is None else hessian[cut, cut]
        name = f"{job.module}.rank{rank}"
        yield Job(name, weight, hessian, job.bits, job.codebook)


@dataclass(frozen=True)
class Encoded:
    """An encoded matrix.

    Attributes:
        tensors: What a checkpoint stores, by name.
        num_weights: Stored weights.
        bits: Bits per weight.
        error: Squared error of the layer's outputs on the calibration text, or of the
            weights without one, over their squares.
    """

    tensors: dict[str, Tensor]
    num_weights: int
    bits: int | float
    error: float


def encode(job: Job, seed: int = 0, **how: Any) -> Encoded:
    """Encodes one matrix.

    Args:
        job: What to encode.
        seed: With the module's name, decides the random signs.
        **how: `progress` and `run` of `quantize_linear`.

    Raises:
        ToolError: The weight is not finite, or there is not enough memory.
    """
    try:
        coded = quantize_linear(
            job.weight.T,
            job.bits,
            job.codebook,
            job.hessian,
            seed=zlib.crc32(f"{seed} {job.module}".encode()),
            name=job.module,
            **how,
        )
    except ValueError as error:
        raise ToolError(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        n, k = job.weight.shape
        raise ToolError(
            f"{job.module}: there is not enough memory to encode a matrix of {n} x {k};"
            " use fewer --threads, or a machine with more"
        ) from error
    tensors = {f"{job.module}.{name}": part for name, part in coded.tensors().items()}
    relative = coded.output_error
    relative = coded.weight_error if relative is None else relative
    k, n = (TILE * size for size in coded.trellis.shape[:2])
    return Encoded(tensors, k * n, coded.bits, relative)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: torch has no error of its own for that."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def padded_bias(bias: Tensor, module: str) -> Tensor:
    """A bias as the format stores it: float16, filled up to whole blocks.

    Raises:
        ToolError: It does not fit.
    """
    stored = F.pad(bias.half(), (0, padded(len(bias)) - len(bias)))
    if not stored.isfinite().all():
        raise ToolError(
            f"{module}.bias: has values that are not finite, or beyond fp16's 65504; "
            "repair the source checkpoint, or leave the module as it is with --dense"
        )
    return stored
