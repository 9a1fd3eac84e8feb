# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A staged checkpoint bears what may happen to a process and its disk."""

import pytest

from tests.checkpoints import write_checkpoint
from tests.exl3 import staged_copy
from tests.exl3.interruptions import Hazards


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(
        tmp_path_factory.mktemp("source"), layers=2, experts=2, shards=2
    )


@pytest.fixture
def hazards(source, tmp_path):
    return Hazards(
        lambda *places: ["copy", *places], source, tmp_path, staged_copy.main
    )


def test_killed_at_20_random_moments(hazards):
    hazards.check_kills(20)


def test_a_limit_on_the_size_of_a_file(hazards):
    hazards.check_file_size_limit(400_000)


def test_what_is_refused(hazards):
    hazards.check_refusals()


def test_ctrl_c(hazards):
    hazards.check_ctrl_c()


def test_killed_before_every_operation_on_a_file(hazards):
    hazards.check_every_operation()
