# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The library's ops. Nothing else touches `exl3._C`."""

import torch
from torch import Tensor

#: The schemas that this file was written for; see kOpsVersion in bindings.cpp.
OPS_VERSION = 2

try:
    import exl3._C  # noqa: F401  (importing it registers the ops)
except ImportError as error:
    raise ImportError(
        f"exl3: the compiled ops are missing or do not load ({error}); "
        "build them with `pip install .` or `pip install -e .`"
    ) from error

_built = torch.ops.exl3.ops_version()
if _built != OPS_VERSION:
    raise ImportError(
        f"exl3: the compiled ops are version {_built} and this code needs "
        f"{OPS_VERSION}; build them anew with `pip install .` or `pip install -e .`"
    )


def ops_version() -> int:
    """Version of the compiled ops' schemas."""
    return torch.ops.exl3.ops_version()


def encode_tiles(tiles: Tensor, words: int, codebook: int) -> tuple[Tensor, Tensor]:
    """Finds the trellis states whose values are nearest to each tile's weights.

    Args:
        tiles: Row-major 16 x 16 tiles, float32 `[num, 256]`; on the scale of the
            codebook, and finite.
        words: int16 words of a tile.
        codebook: Number of the codebook.

    Returns:
        The packed tiles, int16 `[num, words]`, and the weights that they decode to,
        float32 `[num, 256]`. Neither depends on the number of threads or the CPU.
    """
    return torch.ops.exl3.encode_tiles(tiles, words, codebook)


@torch.library.register_fake("exl3::encode_tiles")
def _(tiles: Tensor, words: int, codebook: int) -> tuple[Tensor, Tensor]:
    packed = tiles.new_empty((tiles.shape[0], words), dtype=torch.int16)
    return packed, torch.empty_like(tiles)
