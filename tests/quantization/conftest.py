# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Layers as one rank of several builds them, without any process group."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from exl3.checkpoint.matrix import Matrix
from exl3.format.constants import MULTIPLIERS, Codebook
from tests.exl3_layers import Layer


@pytest.fixture(autouse=True)
def default_dtype():
    """Layers take the default dtype for their dense parameters."""
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture
def as_rank(monkeypatch) -> Callable[[int, int], None]:
    """Has the layers that are built next belong to a rank of so many."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    def be(rank: int, size: int) -> None:
        for module in (linear, parameter, vocab_parallel_embedding):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(
                module, "get_tensor_model_parallel_world_size", lambda: size
            )

    be(0, 1)
    return be


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


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
