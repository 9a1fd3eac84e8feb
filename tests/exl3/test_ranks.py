# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Ranks share a checkpoint between them: all of it, and at legal places only."""

import pytest

from exl3.checkpoint.experts import ExpertLayer
from exl3.checkpoint.matrix import Matrix
from exl3.checkpoint.plan import CheckpointPlan
from exl3.checkpoint.ranks import (
    Cut,
    blocks_around,
    check_tensor_parallel,
    cut_of,
    expert_part,
    inner_cuts,
    legal_sizes,
)
from exl3.format.constants import Codebook
from exl3.format.errors import RankError

NAME = "model.layers.3.mlp.experts"


def layer(ranks, intermediate, sliced=True):
    names = ("gate_proj", "up_proj", "down_proj")
    return ExpertLayer(0, ranks, sliced, 256, intermediate, (), names)


def linears(**sizes):
    """Matrices by the last part of their names."""
    return CheckpointPlan(
        {
            f"model.layers.3.self_attn.{name}": Matrix(*size, 64, Codebook.MCG)
            for name, size in sizes.items()
        }
    )


@pytest.mark.parametrize(
    ("ranks", "intermediate", "size"),
    [(4, 128, 1), (4, 128, 2), (4, 128, 4), (4, 512, 8), (4, 512, 16), (1, 768, 6)],
)
def test_ranks_hold_every_feature_of_every_slice_once(ranks, intermediate, size):
    held = []
    for rank in range(size):
        part = expert_part(layer(ranks, intermediate), NAME, size, rank)
        assert part.intermediate % 128 == 0
        held += [
            (index, feature)
            for index in part.slices
            for feature in range(part.start, part.stop)
        ]
    assert held == [
        (index, feature) for index in range(ranks) for feature in range(intermediate)
    ]


@pytest.mark.parametrize(
    ("ranks", "intermediate", "size", "sizes"),
    [
        (4, 128, 8, [1, 2, 4]),
        (4, 512, 3, [1, 2, 4, 8, 16]),
        (4, 512, 32, [1, 2, 4, 8, 16]),
        (2, 384, 4, [1, 2, 6]),
        (3, 128, 2, [1, 3]),
    ],
)
def test_other_sizes_are_refused_with_those_that_can(ranks, intermediate, size, sizes):
    with pytest.raises(RankError) as error:
        expert_part(layer(ranks, intermediate), NAME, size, 0)
    line = str(error.value)
    for part in (
        NAME,
        f"{ranks} slices of {intermediate}",
        f"{size} ranks",
        str(sizes),
    ):
        assert part in line


def test_whole_experts_are_cut_by_their_stored_width():
    with pytest.raises(RankError, match=r"experts: 384 .* 4 ranks; .*: \[1, 3\]"):
        expert_part(layer(1, 384, sliced=False), NAME, 4, 0)
    # moe_intermediate_size 704 is stored as 768, and that is what two ranks share.
    part = expert_part(layer(1, 768, sliced=False), NAME, 2, 1)
    assert (part.start, part.stop) == (384, 768)


@pytest.mark.parametrize("vocabulary", [500, 512, 32000])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_head_is_cut_anywhere(vocabulary, size):
    """Ranks hold blocks of 128 around their part, and keep each column once."""
    stored = -(-vocabulary // 128) * 128
    part = -(-vocabulary // (64 * size)) * 64
    kept = []
    for rank in range(size):
        blocks = blocks_around(rank * part, (rank + 1) * part, stored)
        assert blocks.start % 128 == 0 and blocks.stop % 128 == 0
        assert 0 <= blocks.skip < 128
        assert blocks.start + blocks.skip + blocks.keep <= blocks.stop <= stored
        first = blocks.start + blocks.skip
        kept += range(first, first + blocks.keep)
    assert kept[:vocabulary] == list(range(vocabulary))
    assert len(set(kept)) == len(kept)


def test_a_rank_past_the_stored_columns_keeps_none():
    blocks = blocks_around(640, 768, 512)
    assert (blocks.start, blocks.stop, blocks.skip, blocks.keep) == (512, 512, 0, 0)


CONFIG = {"num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("features", "size", "legal"),
    [
        (2176, 2, [1, 17]),
        (384, 4, [1, 3]),
        (512, 8, [1, 2, 4]),
    ],
)
def test_cuts_inside_blocks_are_found(features, size, legal):
    plan = linears(q_proj=(256, features), wk=(256, 128))
    (cut,) = inner_cuts(plan, {}, size)
    assert cut == ("model.layers.3.self_attn.q_proj", "out-features", features, legal)
    plan = linears(o_proj=(features, 256))
    (cut,) = inner_cuts(plan, {}, size)
    assert (cut.dimension, cut.features, cut.legal) == ("in-features", features, legal)
    assert not inner_cuts(plan, {}, 1)
    (cut,) = inner_cuts(plan, CONFIG, size)
    assert cut.legal == [n for n in legal if 16 % n == 0]


def test_ranks_may_share_a_head_of_keys_and_values():
    plan = linears(k_proj=(256, 1024))
    assert not inner_cuts(plan, CONFIG, 16)
    assert inner_cuts(linears(k_proj=(256, 512)), CONFIG, 16)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"num_attention_heads": 12}, [1, 2, 3, 4, 6, 12]),
        ({"num_attention_heads": 12, "num_key_value_heads": 2}, [1, 2, 4, 6, 12]),
        (
            {
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "kv_lora_rank": 512,
            },
            [1, 2, 3, 4, 6, 12],
        ),
        ({"text_config": {"linear_num_key_heads": 4}}, [1, 2, 4]),
        ({"moe_intermediate_size": 704}, [1, 2, 4, 8, 11, 16, 22, 32, 44, 64]),
        ({"num_attention_heads": "many", "num_key_value_heads": 0}, list(range(1, 65))),
    ],
)
def test_the_ranks_divide_the_configs_counts(config, sizes):
    assert legal_sizes(CheckpointPlan(), config) == sizes


def test_the_refusal_lists_the_sizes_that_fit_all_of_the_checkpoint():
    plan = CheckpointPlan({}, {NAME: layer(2, 512), "other": layer(4, 128)})
    check_tensor_parallel(plan, CONFIG, 4)
    with pytest.raises(RankError, match=r"num_attention_heads 16; .*: \[1, 2, 4\]$"):
        check_tensor_parallel(plan, CONFIG, 3)
    with pytest.raises(RankError, match=r"other: 4 slices of 128 .*: \[1, 2, 4\]$"):
        check_tensor_parallel(plan, CONFIG, 8)


@pytest.mark.parametrize(
    ("vocabulary", "sizes"),
    [(500, [1, 2, 4, 8, 16, 32, 64]), (300, [1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 64])],
)
def test_ranks_divide_the_vocabulary_filled_up_to_64(vocabulary, sizes):
    config = {"vocab_size": vocabulary}
    assert legal_sizes(CheckpointPlan(), config) == sizes
    with pytest.raises(RankError, match="3 ranks do not divide the vocabulary, vocab"):
        check_tensor_parallel(CheckpointPlan(), config, 3)


def test_each_module_has_its_cut():
    cuts = {
        "model.layers.1.self_attn.q_b_proj": Cut.COLUMNS,
        "model.layers.1.mlp.shared_experts.down_proj": Cut.ROWS,
        "model.embed_tokens": Cut.VOCABULARY,
        "model.layers.3.shared_head.head": Cut.VOCABULARY,
        "lm_head": Cut.VOCABULARY,
        "model.layers.1.self_attn.indexer.wq_b": Cut.WHOLE,
        "model.layers.1.self_attn.kv_a_proj_with_mqa": Cut.WHOLE,
        "model.layers.1.input_layernorm": Cut.WHOLE,
    }
    assert {module: cut_of(module) for module in cuts} == cuts
