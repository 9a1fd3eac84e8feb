# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Small random models and texts for the demo model's tests."""

import pytest
import torch
from tokenizers import Tokenizer

from tools.demo_model import tokenizer as demo_tokenizer
from tools.demo_model.config import ModelConfig
from tools.demo_model.model import DemoModel

TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "And the earth was without form, and void; and darkness was upon the deep.",
]


def random_model(widths: tuple[int, ...]) -> DemoModel:
    """A small model whose norms, gates and selection biases are all at work."""
    torch.manual_seed(7)
    config = ModelConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=len(widths) - 1,
        intermediate_size=96,
        moe_intermediate_size=32,
        widths=widths,
        num_attention_heads=2,
        q_lora_rank=32,
        kv_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        max_position_embeddings=128,
    )
    model = DemoModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.15)
            else:
                weight.uniform_(0.5, 1.5)
        for router in model.routers():
            router.e_score_correction_bias.normal_(0.0, 0.2)
    return model


@pytest.fixture
def equal_model() -> DemoModel:
    """Widths as trained: all mixture-of-experts layers alike."""
    return random_model((0, 6, 6, 6))


@pytest.fixture
def ragged_model() -> DemoModel:
    """Widths as pruned."""
    return random_model((0, 6, 3, 4))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer trained on two sentences."""
    return demo_tokenizer.train(TEXTS)
