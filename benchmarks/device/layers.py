# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Random EXL3 layers on a device. Any words are a valid trellis."""

from dataclasses import dataclass

import torch
from torch import Tensor

from exl3.format.constants import TILE


@dataclass(frozen=True)
class Matrix:
    """One matrix as `ops.linear` takes it, k x n."""

    k: int
    n: int
    words: int  # int16 words of a tile
    codebook: int
    trellis: Tensor  # int16, flat, strip-major
    suh: Tensor  # float16 [1, k]
    svh: Tensor  # float16 [n]

    @property
    def shards(self) -> list[int]:
        """All columns are kept."""
        return [self.n, 0, self.n, self.words, self.codebook]

    @property
    def bytes(self) -> int:
        """What a product reads of it."""
        return 2 * (self.trellis.numel() + self.suh.numel() + self.svh.numel())

    def stored(self) -> Tensor:
        """The trellis as checkpoints have it, int16 [k/16, n/16, words], on the CPU."""
        strips = self.trellis.view(self.n // TILE, self.k // TILE, self.words)
        return strips.transpose(0, 1).contiguous().cpu()


def random_words(count: int, device: torch.device) -> Tensor:
    """Random int16 [count]."""
    return torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, device=device)


def random_scales(*shape: int, device: torch.device, spread: float = 1.0) -> Tensor:
    """float16: random signs, sizes around `spread`."""
    scales = (torch.rand(shape, device=device) + 0.5) * spread
    return torch.where(torch.rand(shape, device=device) < 0.5, -scales, scales).half()


def random_matrix(
    k: int, n: int, words: int, codebook: int, device: torch.device
) -> Matrix:
    """A matrix whose outputs have about the spread of its inputs."""
    return Matrix(
        k,
        n,
        words,
        codebook,
        random_words(k * n // TILE**2 * words, device),
        random_scales(1, k, device=device, spread=k**-0.5),
        random_scales(n, device=device),
    )


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer, as `ops.moe` takes them."""

    w13: Tensor
    w2: Tensor
    table: Tensor  # int64 [experts, 3, 3]
    suh13: Tensor
    svh13: Tensor
    suh2: Tensor
    svh2: Tensor

    @property
    def bytes(self) -> int:
        """What a product with all of them reads."""
        tensors = (self.w13, self.w2, self.suh13, self.svh13, self.suh2, self.svh2)
        return 2 * sum(tensor.numel() for tensor in tensors)


def random_experts(
    hidden: int,
    intermediate: int,
    words: list[int],
    codebook: int,
    device: torch.device,
) -> Experts:
    """One expert for each entry of `words`, all its matrices with tiles of so many."""
    size = torch.tensor(words) * (hidden * intermediate // TILE**2)
    ups = torch.cumsum(2 * size, 0) - 2 * size
    downs = torch.cumsum(size, 0) - size
    offsets = torch.stack([ups, ups + size, downs], 1)
    table = torch.stack(
        [
            offsets,
            torch.tensor(words).unsqueeze(1).expand(-1, 3),
            torch.full((len(words), 3), codebook),
        ],
        2,
    )
    count = len(words)
    return Experts(
        random_words(2 * int(size.sum()), device),
        random_words(int(size.sum()), device),
        table.contiguous().to(device),
        random_scales(count, 2, hidden, device=device, spread=hidden**-0.5),
        random_scales(count, 2, intermediate, device=device),
        random_scales(count, intermediate, device=device, spread=intermediate**-0.5),
        random_scales(count, hidden, device=device),
    )
