# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Random EXL3 matrices as a checkpoint and its plan hold them."""

from typing import Any

import numpy as np
import torch

from exl3.checkpoint.matrix import Matrix
from exl3.format.constants import MULTIPLIERS, Codebook
from tests.exl3_layers import Layer


def planned(layer: Layer, **fields: Any) -> Matrix:
    """What a plan says of a matrix."""
    return Matrix(
        layer.in_features,
        layer.out_features,
        layer.words,
        Codebook(layer.codebook),
        **fields,
    )


def stored_tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """The tensors of a matrix as a checkpoint holds them, by field."""
    tensors = {
        "trellis": torch.from_numpy(layer.trellis),
        "suh": torch.from_numpy(layer.suh),
        "svh": torch.from_numpy(layer.svh),
    }
    codebook = Codebook(layer.codebook)
    if codebook in MULTIPLIERS:
        value = np.uint32(MULTIPLIERS[codebook]).view(np.int32)
        tensors[codebook.label] = torch.tensor(int(value), dtype=torch.int32)
    return tensors
