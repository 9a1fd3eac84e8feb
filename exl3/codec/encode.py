# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""From the weight of a linear layer to the tensors of its EXL3 form."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3.codec.decode import effective_weight
from exl3.codec.ldlq import feedback_factor, quantize_with_feedback
from exl3.codec.regularize import regularize
from exl3.codec.scale import search_scale
from exl3.codec.viterbi import quantize_matrix
from exl3.format.constants import (
    HADAMARD,
    MULTIPLIERS,
    TILE,
    Codebook,
    bits_of,
    is_legal_rate,
    padded,
)

#: Called with the number of stored weights encoded since the last call.
Progress = Callable[[int], None]
Encoded = tuple[Tensor, Tensor]
#: Applies a function to each of several strips: `map`, or that of a pool of threads.
Run = Callable[[Callable[[Tensor], Encoded], Iterable[Tensor]], Iterable[Encoded]]
#: Columns that are encoded together. Those of other strips make no difference to them,
#: so strips may run side by side; and as the width is fixed, so are the bits.
STRIP = HADAMARD


@dataclass(frozen=True)
class QuantizedLinear:
    """The stored form of one linear layer; k and n are multiples of 128.

    Attributes:
        trellis: int16 `[k/16, n/16, words]`.
        suh: Signs and scales of the inputs, float16 `[k]`.
        svh: Signs and scales of the outputs, float16 `[n]`.
        codebook: The trellis's codebook.
        calibrated: Whether the inputs' second moments were made use of.
        weight_error: Squared error of the weights, over their squares.
        output_error: Squared error of the layer's outputs on the calibration inputs,
            over their squares; None without these.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook
    calibrated: bool
    weight_error: float
    output_error: float | None

    @property
    def bits(self) -> int | float:
        """Bits per weight."""
        return bits_of(self.trellis.shape[-1])

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint stores of the layer, by the last part of the names."""
        stored = {"trellis": self.trellis, "suh": self.suh, "svh": self.svh}
        if self.codebook in MULTIPLIERS:
            # The bits of an unsigned number, as an int32.
            marker = torch.tensor(MULTIPLIERS[self.codebook], dtype=torch.uint32)
            stored[self.codebook.label] = marker.view(torch.int32)
        return stored


def quantize_linear(
    weight: Tensor,
    bits: int | float,
    codebook: Codebook,
    hessian: Tensor | None = None,
    *,
    seed: int = 0,
    name: str = "weight",
    progress: Progress | None = None,
    run: Run = map,
) -> QuantizedLinear:
    """Encodes one weight matrix.

    Args:
        weight: `[k, n]`, the transpose of a torch layer's; filled up with zeros to
            multiples of 128.
        bits: 1 to 8, or 1.5, 2.5 or 3.5 with mul1.
        codebook: The trellis's codebook.
        hessian: Mean of `x.T @ x` over rows x of the layer's inputs, `[k, k]`. Without
            it, or where it is all zeros or not finite, all weights count alike.
        seed: Decides the random signs.
        name: What the weight is called in messages.
        progress: Called now and then, by whichever thread encodes.
        run: Encodes the strips of the matrix.

    Raises:
        ValueError: The rate does not exist, the weight is not a matrix of finite
            numbers, or the Hessian's size is another.
    """
    words = int(bits * TILE)
    if words != bits * TILE or not is_legal_rate(words, codebook):
        raise ValueError(
            f"{name}: {codebook.label} has no rate of {bits} bits per weight; choose 1 "
            "to 8, or with mul1 also 1.5, 2.5 or 3.5"
        )
    _check_weight(name, weight)
    k = weight.shape[0]
    if hessian is not None and hessian.shape != (k, k):
        raise ValueError(
            f"{name}: the Hessian has shape {list(hessian.shape)}; expected {[k, k]}, "
            "from the inputs of this layer"
        )
    weight = _padded(weight)
    if hessian is not None:
        hessian = F.pad(hessian.float(), (0, len(weight) - k, 0, len(weight) - k))

    parts = regularize(weight, seed)
    factor = None if hessian is None else feedback_factor(hessian, parts.su)
    scale = search_scale(parts.inner, words, codebook, feedback=factor is not None)
    inner = parts.inner * scale

    def advance(weights: int) -> None:
        if progress is not None:
            progress(weights)

    def encode(strip: Tensor) -> Encoded:
        if factor is None:
            return _quantize(strip, words, codebook, advance)
        return quantize_with_feedback(strip, factor, words, codebook, advance)

    packed, values = zip(*run(encode, inner.split(STRIP, 1)))
    trellis, quantized = torch.cat(packed, 1), torch.cat(values, 1)
    suh, svh = _stored_scales(name, parts.su / scale, parts.sv)
    error = weight - effective_weight(quantized, suh, svh)
    return QuantizedLinear(
        trellis,
        suh,
        svh,
        codebook,
        calibrated=factor is not None,
        weight_error=_ratio(error.square().sum(), weight.square().sum()),
        output_error=None
        if factor is None or hessian is None
        else _ratio((hessian @ error * error).sum(), (hessian @ weight * weight).sum()),
    )


def _check_weight(name: str, weight: Tensor) -> None:
    if weight.ndim != 2 or 0 in weight.shape or not weight.is_floating_point():
        raise ValueError(
            f"{name}: {weight.dtype} of shape {list(weight.shape)} is not a matrix of "
            "floating point numbers"
        )
    wrong = (~weight.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"{name}: {len(wrong)} of {weight.numel()} weights are not finite, the "
            f"first is {weight[row, column].item()} at [{row}, {column}]; repair the "
            "source checkpoint"
        )


def _padded(weight: Tensor) -> Tensor:
    k, n = weight.shape
    return F.pad(weight.float(), (0, padded(n) - n, 0, padded(k) - k))


def _quantize(
    inner: Tensor, words: int, codebook: Codebook, progress: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
    parts = []
    for rows in inner.split(HADAMARD):
        parts.append(quantize_matrix(rows, words, codebook))
        progress(rows.numel())
    trellis, quantized = zip(*parts)
    return torch.cat(trellis), torch.cat(quantized)


def _stored_scales(name: str, su: Tensor, sv: Tensor) -> tuple[Tensor, Tensor]:
    """The scales in fp16.

    Those of the outputs are near 1. If the weights are so large or so small that those
    of the inputs would not fit, both get half of it, as a power of two.
    """
    largest = su.abs().max()
    if largest > 0 and not 2**-8 < largest < 2**8:
        half = 2.0 ** (largest / sv.abs().max()).log2().div(2).round()
        su, sv = su / half, sv * half
    suh, svh = su.half(), sv.half()
    if not (suh.isfinite().all() and svh.isfinite().all()):
        raise ValueError(
            f"{name}: its rows and columns need scales up to {su.abs().max():.3g} and "
            f"{sv.abs().max():.3g}, and fp16 ends at 65504; check the source checkpoint"
        )
    return suh, svh


def _ratio(error: Tensor, whole: Tensor) -> float:
    return (error / whole).item() if whole > 0 else 0.0
