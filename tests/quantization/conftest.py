# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Layers as one rank of several builds them, without any process group."""

from collections.abc import Callable

import numpy as np
import pytest


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
