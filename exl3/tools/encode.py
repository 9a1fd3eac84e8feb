# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""From a linear layer's weight to the tensors of its EXL3 form."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from exl3.codec import quantize_linear
from exl3.format.constants import HADAMARD, Codebook


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


def encode(job: Job, seed: int) -> dict[str, Tensor]:
    """Encodes one matrix.

    Args:
        job: What to encode.
        seed: Decides the random signs.

    Returns:
        The tensors that a checkpoint stores, by name.
    """
    coded = quantize_linear(
        job.weight.T,
        job.bits,
        job.codebook,
        job.hessian,
        seed=seed,
        name=job.module,
    )
    return {f"{job.module}.{name}": part for name, part in coded.tensors().items()}
