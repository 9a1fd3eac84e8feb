# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Where prompts are computed whole, a batch takes the longest that there may be."""

import pytest

from tests.serving.generate import MTP, REPO
from vllm.engine.arg_utils import EngineArgs

MODEL = REPO / "examples" / "demo-glm-dsa-ragged-exl3"


@pytest.mark.parametrize("speculative", [None, MTP], ids=["plain", "MTP"])
def test_the_scheduler_takes_the_longest_prompt(speculative):
    config = EngineArgs(
        str(MODEL),
        dtype="float32",
        max_model_len=1024,
        # As the default of 2,048 is to a model of a longer context.
        max_num_batched_tokens=256,
        enable_chunked_prefill=True,
        speculative_config=speculative,
    ).create_engine_config()
    scheduler = config.scheduler_config
    # Upstream turns it off for MLA on the CPU; else the rest would not matter.
    assert not scheduler.enable_chunked_prefill
    assert scheduler.max_num_batched_tokens >= 1024
    assert (scheduler.max_num_scheduled_tokens or 1024) >= 1024
