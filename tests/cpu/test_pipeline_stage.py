# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A later pipeline stage on the CPU has buffers to receive into, once it is loaded."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory
from vllm.sequence import IntermediateTensors
from vllm.v1.worker import cpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

MAX_TOKENS, HIDDEN = 6, 16


def load_runner(monkeypatch, *, is_first_rank):
    """Returns the runner of one stage after `load_model`, without a model."""

    def load_model(self, load_dummy_weights=False):
        self.model = SimpleNamespace(
            make_empty_intermediate_tensors=make_empty_intermediate_tensors_factory(
                ["hidden_states", "residual"], HIDDEN
            )
        )

    monkeypatch.setattr(CPUModelRunner.__base__, "load_model", load_model)
    stage = SimpleNamespace(is_first_rank=is_first_rank)
    monkeypatch.setattr(cpu_model_runner, "get_pp_group", lambda: stage)
    runner = object.__new__(CPUModelRunner)
    runner.intermediate_tensors = None
    runner.max_num_tokens = MAX_TOKENS
    runner.model_config = SimpleNamespace(dtype=torch.bfloat16)
    runner.device = torch.device("cpu")
    runner.load_model()
    return runner


@pytest.mark.parametrize("num_tokens", [1, MAX_TOKENS])
def test_a_later_stage_receives(monkeypatch, num_tokens):
    runner = load_runner(monkeypatch, is_first_rank=False)
    sent = {
        name: torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16)
        for name in ("hidden_states", "residual")
    }
    received = runner.sync_and_gather_intermediate_tensors(
        num_tokens, IntermediateTensors(sent), True
    )
    for name, tensor in sent.items():
        assert torch.equal(received[name], tensor)


def test_the_first_stage_receives_nothing(monkeypatch):
    assert load_runner(monkeypatch, is_first_rank=True).intermediate_tensors is None
