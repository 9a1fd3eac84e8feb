# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How modules are cut for the ranks of tensor parallelism.

Features are rotated in blocks of 128, so a matrix is cut between blocks. What is cut is
the stored width, padding included. Routed experts must be cut so. A linear layer may be
cut anywhere: a rank then holds all blocks that its part touches, and leaves out the
columns or rows of others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from exl3.checkpoint.experts import ExpertLayer
from exl3.checkpoint.plan import CheckpointPlan, text_config
from exl3.format.constants import HADAMARD
from exl3.format.errors import RankError

#: The largest size that is tried when legal sizes are listed.
MAX_SIZE = 64

#: Linear layers that ranks cut, by the last part of their names.
_CUT_COLUMNS = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    *("in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
}
_CUT_ROWS = {"o_proj", "down_proj", "out_proj", "w2"}
#: Tables over the vocabulary, which ranks cut by rows of tokens.
_CUT_VOCABULARY = {"embed_tokens", "lm_head", "head"}
#: vLLM fills the vocabulary up to a multiple of this, and ranks divide that.
_VOCABULARY_STEP = 64
#: Counts in a config that the ranks must divide.
_DIVIDED = (
    *("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"),
    "moe_intermediate_size",
)


class Cut(Enum):
    """How ranks share a module that is no routed expert's."""

    WHOLE = "whole"  # each of them has all of it
    COLUMNS = "columns"  # each has some out-features
    ROWS = "rows"  # each has some in-features
    VOCABULARY = "vocabulary"  # each has some tokens


def cut_of(module: str) -> Cut:
    """How ranks share a module, by its name in the checkpoint."""
    name = module.rpartition(".")[2]
    if name in _CUT_COLUMNS:
        return Cut.COLUMNS
    if name in _CUT_ROWS:
        return Cut.ROWS
    return Cut.VOCABULARY if name in _CUT_VOCABULARY else Cut.WHOLE


@dataclass(frozen=True)
class ExpertPart:
    """What one rank holds of each expert of a layer."""

    slices: range  # stored ranks, each of them one virtual expert
    start: int  # first intermediate feature within each of these slices
    stop: int  # end of the intermediate features within each of these slices

    @property
    def intermediate(self) -> int:
        """Intermediate features of one virtual expert."""
        return self.stop - self.start


def expert_part(layer: ExpertLayer, name: str, size: int, rank: int) -> ExpertPart:
    """What a rank holds of the experts of a layer.

    Args:
        layer: The experts as stored, in `layer.ranks` slices.
        name: The layer's name, for the refusal.
        size: Tensor-parallel ranks.
        rank: This one.

    Raises:
        RankError: Neither divides the other, or a slice cannot be cut so often.
    """
    if layer.ranks % size == 0:
        count = layer.ranks // size
        slices = range(rank * count, (rank + 1) * count)
        return ExpertPart(slices, 0, layer.intermediate)
    problem = _expert_problem(layer, name, size)
    if problem is not None:
        sizes = [n for n in _SIZES if _expert_problem(layer, name, n) is None]
        raise RankError(f"{problem}; tensor-parallel sizes that can: {sizes}")
    cuts = size // layer.ranks
    part = layer.intermediate // cuts
    start = rank % cuts * part
    return ExpertPart(range(rank // cuts, rank // cuts + 1), start, start + part)


def _expert_problem(layer: ExpertLayer, name: str, size: int) -> str | None:
    if layer.ranks % size == 0:
        return None
    cuts, rest = divmod(size, layer.ranks)
    if rest == 0 and layer.intermediate % (HADAMARD * cuts) == 0:
        return None
    slices = f"{layer.ranks} slices of " if layer.sliced else ""
    return (
        f"{name}: {slices}{layer.intermediate} intermediate features, in blocks of "
        f"{HADAMARD}, cannot be shared by {size} ranks"
    )


@dataclass(frozen=True)
class Blocks:
    """Whole blocks of 128 features around a range of a stored dimension."""

    start: int  # first feature of the blocks, a multiple of 128
    stop: int  # end of the blocks, a multiple of 128
    skip: int  # features of the blocks that come before the range
    keep: int  # features of the range that are stored


def blocks_around(start: int, stop: int, stored: int) -> Blocks:
    """The blocks that a rank holds of a dimension that is cut anywhere.

    A head is: its vocabulary is divided without regard to blocks. A rank holds every
    block that its range touches.

    Args:
        start: First feature of the rank's range.
        stop: End of the range. Features past the stored ones are padding, and no rank
            keeps them.
        stored: Features as stored.
    """
    stop = min(stop, stored)
    start = min(start, stop)
    first = start // HADAMARD * HADAMARD
    last = -(-stop // HADAMARD) * HADAMARD
    return Blocks(first, max(first, last), start - first, stop - start)


def check_tensor_parallel(
    plan: CheckpointPlan, config: Mapping[str, Any], size: int
) -> None:
    """Refuses a number of ranks that a checkpoint cannot be cut for.

    Args:
        plan: The checkpoint's plan.
        config: Its `config.json`.
        size: Tensor-parallel ranks.

    Raises:
        RankError: Names what cannot be cut, and the sizes that fit the checkpoint.
    """
    problem = problem_with(plan, config, size)
    if problem is not None:
        raise RankError(
            f"{problem}; tensor-parallel sizes that fit this checkpoint: "
            f"{legal_sizes(plan, config)}"
        )


def legal_sizes(plan: CheckpointPlan, config: Mapping[str, Any]) -> list[int]:
    """The numbers of ranks, up to `MAX_SIZE`, that a checkpoint can be cut for."""
    return [size for size in _SIZES if problem_with(plan, config, size) is None]


def problem_with(
    plan: CheckpointPlan, config: Mapping[str, Any], size: int
) -> str | None:
    """Why a checkpoint cannot be cut for so many ranks, or None if it can."""
    text = text_config(config)
    for field in _DIVIDED:
        count = _count(text, field)
        if count is not None and count % size:
            return f"config.json: {size} ranks do not divide {field} {count}"
    vocabulary = padded_vocabulary(text)
    if vocabulary is not None and vocabulary % size:
        return (
            f"config.json: {size} ranks do not divide the vocabulary, vocab_size "
            f"{text['vocab_size']} filled up to {vocabulary}"
        )
    heads = kv_heads(text)
    if heads is not None and heads % size and size % heads:
        return (
            f"config.json: {size} ranks neither divide num_key_value_heads {heads} nor "
            "are a multiple of it"
        )
    problems = (_expert_problem(*item, size) for item in _by_layer(plan))
    return next((problem for problem in problems if problem is not None), None)


class InnerCut(NamedTuple):
    """A linear layer that ranks cut inside a block."""

    module: str
    dimension: str  # "in-features" or "out-features"
    features: int  # as stored
    legal: list[int]  # sizes that fit the checkpoint and cut this between blocks


def inner_cuts(
    plan: CheckpointPlan, config: Mapping[str, Any], size: int
) -> list[InnerCut]:
    """Linear layers that so many ranks cut inside a block of 128 features.

    They are served, and a block that two ranks touch is computed by both.
    """
    heads = kv_heads(text_config(config))
    legal = legal_sizes(plan, config)
    found = []
    for module, matrix in plan.linears.items():
        cut = cut_of(module)
        if cut is Cut.COLUMNS:
            dimension, features = "out-features", matrix.out_features
        elif cut is Cut.ROWS:
            dimension, features = "in-features", matrix.in_features
        else:
            continue
        most = most_parts(module, heads)

        def is_between(size: int, features: int = features, most: int = most) -> bool:
            return features % (HADAMARD * min(size, most)) == 0

        if not is_between(size):
            fit = [n for n in legal if is_between(n)]
            found.append(InnerCut(module, dimension, features, fit))
    return found


_SIZES = range(1, MAX_SIZE + 1)


def _by_layer(plan: CheckpointPlan) -> list[tuple[ExpertLayer, str]]:
    return [(layer, name) for name, layer in plan.experts.items()]


def most_parts(module: str, heads: int | None) -> int:
    """Parts that a module is cut into at most.

    Args:
        module: Its name. Several ranks may hold the same head of keys and values.
        heads: Of keys and values; None if they have none of their own.
    """
    name = module.rpartition(".")[2]
    return heads if name in ("k_proj", "v_proj") and heads else MAX_SIZE


def padded_vocabulary(text: Mapping[str, Any]) -> int | None:
    """Tokens of the vocabulary that the ranks divide, or None if not stated."""
    size = _count(text, "vocab_size")
    return None if size is None else -(-size // _VOCABULARY_STEP) * _VOCABULARY_STEP


def kv_heads(text: Mapping[str, Any]) -> int | None:
    """Heads of keys and values, or None where all heads share one latent vector."""
    return None if text.get("kv_lora_rank") else _count(text, "num_key_value_heads")


def _count(text: Mapping[str, Any], field: str) -> int | None:
    value = text.get(field)
    return value if type(value) is int and value > 0 else None
