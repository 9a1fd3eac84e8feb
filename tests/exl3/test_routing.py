# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A width must leave the router enough experts in its groups."""

import pytest

from exl3.checkpoint.file_header import TensorHeader
from exl3.format.errors import CheckpointError
from tests.exl3.widths import BASE, gates, resolve

GROUPS = {"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc"}


@pytest.mark.parametrize(
    ("width", "groups", "says"),
    [
        (6, 4, "does not divide"),  # case 13 of the field
        (8, 8, "8 groups of 1"),  # a group's best two are not there
        (8, 4, None),
        (12, 4, None),
    ],
)
def test_grouped_routing_must_work(width, groups, says):
    config = {**BASE, **GROUPS, "n_group": groups, "n_routed_experts": width}
    headers = gates([0, *[width] * 5])
    if says is None:
        assert resolve(config, headers) is None
        return
    with pytest.raises(CheckpointError, match=says):
        resolve(config, headers)


def test_a_stored_bias_needs_two_experts_a_group():
    """GLM-4's config has no `topk_method`."""
    config = {**BASE, "n_group": 8, "topk_group": 4}
    bias = TensorHeader(
        "model.layers.1.mlp.gate.e_score_correction_bias", "F32", (8,), "m"
    )
    headers = gates([0, 8, 8, 8, 8, 8])
    assert resolve(config, headers) is None
    with pytest.raises(CheckpointError, match=r"8 groups of 1.*keep at least 16"):
        resolve(config, [*headers, bias])


def test_groups_must_hold_top_k():
    config = {**BASE, **GROUPS, "topk_group": 1, "num_experts_per_tok": 4}
    with pytest.raises(CheckpointError, match="keep at least 16"):
        resolve(config, gates([0, 8, 8, 8, 8, 8]))


def test_softmax_groups_may_hold_one_expert():
    config = {**BASE, "n_group": 8, "topk_group": 4, "topk_method": "group_limited"}
    assert resolve(config, gates([0, 8, 8, 8, 8, 8])) is None
