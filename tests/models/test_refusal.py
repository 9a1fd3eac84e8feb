# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A refusal is one line, wherever it was raised and whatever wraps it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, model_validator

from exl3.format.errors import CheckpointError
from vllm.refusal import (
    RefusedOptionError,
    collected_refusals,
    leaving_refusals,
    refusal_in,
)

CHILD = """
from exl3.format.errors import CheckpointError
from vllm.refusal import leaving_refusals
with leaving_refusals():
    raise CheckpointError("lm_head.suh: no")
"""


def test_a_refusal_is_found_inside_what_wraps_it():
    class Config(BaseModel):
        @model_validator(mode="after")
        def check(self):
            raise RefusedOptionError("leave --this out")

    with pytest.raises(ValueError, match="leave --this out") as wrapped:
        Config()
    assert refusal_in(wrapped.value) == "leave --this out"
    outer = RuntimeError("startup failed")
    outer.__cause__ = CheckpointError("config.json: no")
    assert refusal_in(outer) == "config.json: no"
    assert refusal_in(ValueError("anything else")) is None


def test_a_refusal_of_another_process_is_collected():
    with collected_refusals() as first:
        assert first() is None
        child = subprocess.run([sys.executable, "-c", CHILD], check=False)
        assert child.returncode == 1
        assert first() == "lm_head.suh: no"


def test_other_errors_are_not_collected():
    with collected_refusals() as first:
        with pytest.raises(OSError), leaving_refusals():
            raise OSError("disk")
        assert first() is None


def test_a_refusal_without_a_server_is_raised_as_it_is():
    with pytest.raises(CheckpointError, match="no"), leaving_refusals():
        raise CheckpointError("no")


def test_a_refusal_that_is_still_being_written_is_none_yet(monkeypatch):
    with collected_refusals() as first:
        Path(os.environ["HETERO_REFUSAL_FILE"]).touch()
        assert first() is None
