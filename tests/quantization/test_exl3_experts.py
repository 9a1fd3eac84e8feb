# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Routed experts, stored for P ranks and run on T, whole, shared or cut again.

The reference is float64: every slice of a chosen expert by itself, from the dense
weights of `tests.reference_codec`.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from exl3.checkpoint.experts import ExpertLayer
from exl3.format.constants import Codebook
from exl3.format.errors import RankError, TensorError
from tests.exl3_layers import error_bound, make_layer, relative_error
from tests.exl3_stored import stored_tensors
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.exl3.experts import (
    Exl3ExpertsMethod,
    ExpertMatrix,
)
from vllm.model_executor.layers.quantization.exl3.tensors import Arrivals
from vllm.refusal import RefusedOptionError

NAME = "model.layers.1.mlp.experts"
HIDDEN, WIDTH = 256, 4
# Two products one after another, each with the fast kernels' rounding.
BOUND = error_bound(torch.float32, exact=False, chain=3)
RATES = [(48, 1), (64, 1), (96, 0), (40, 2), (16, 1)]


class Stored:
    """The experts of a layer as a checkpoint has them."""

    def __init__(self, rng, ranks=1, intermediate=256, sliced=True, shared_h=False):
        self.slices = {}
        encodings = []
        for expert in range(WIDTH):
            codes = []
            for index, projection in enumerate(("gate", "up", "down")):
                words, codebook = RATES[(expert + 2 * index) % len(RATES)]
                codes.append((words, Codebook(codebook)))
                shape = (HIDDEN, intermediate)
                for rank in range(ranks):
                    self.slices[expert, projection, rank] = make_layer(
                        rng,
                        *(shape[::-1] if projection == "down" else shape),
                        words,
                        codebook,
                    )
            encodings.append(
                tuple(SimpleNamespace(words=w, codebook=c) for w, c in codes)
            )
        self.shared = {}
        if shared_h:
            for (expert, projection, rank), layer in self.slices.items():
                side = "svh" if projection == "down" else "suh"
                key = projection, rank
                if expert == 0:
                    self.shared[key] = side, getattr(layer, side)
                object.__setattr__(layer, side, self.shared[key][1])
        self.plan = ExpertLayer(
            width=WIDTH,
            ranks=ranks,
            sliced=sliced,
            hidden=HIDDEN,
            intermediate=intermediate,
            encodings=tuple(encodings),
            spelling=("gate_proj", "up_proj", "down_proj"),
            shared_h=shared_h,
        )

    def tensors(self):
        """Every stored tensor: what it belongs to, its field and its value."""
        for (expert, projection, rank), layer in self.slices.items():
            for field, tensor in stored_tensors(layer).items():
                if field != self.shared.get((projection, rank), ("",))[0]:
                    yield ExpertMatrix(NAME, expert, projection, rank), field, tensor
        for (projection, rank), (field, vector) in self.shared.items():
            yield (
                ExpertMatrix(NAME, None, projection, rank),
                field,
                torch.from_numpy(vector),
            )

    def reference(self, x, ids, weights, size=None, limit=math.inf):
        """float64 [tokens, hidden]; `size` is the intermediate without padding."""
        out = np.zeros_like(x)
        for token, chosen in enumerate(ids):
            for expert, weight in zip(chosen, weights[token], strict=True):
                for rank in range(self.plan.ranks):
                    gate, up, down = (
                        self.slices[expert, projection, rank].weight()
                        for projection in ("gate", "up", "down")
                    )
                    g, u = x[token] @ gate, x[token] @ up
                    g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
                    inner = (g / (1 + np.exp(-g)) * u)[:size]
                    out[token] += weight * (inner @ down[:size])
        return out


def make_rank(stored, rank=0, size=1, experts=None, intermediate=None, **fields):
    """A layer as one rank builds it.

    Args:
        stored: The experts.
        rank: The rank within `size`.
        size: Ranks that share each expert.
        experts: The experts of this rank under expert parallelism; None: all.
        intermediate: The model's size; None: as stored.
        **fields: Attributes of upstream's layer.
    """
    local = list(range(WIDTH)) if experts is None else experts
    moe = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(
            tp_size=size, tp_rank=rank, enable_eplb=fields.pop("eplb", False)
        ),
        intermediate_size=intermediate or stored.plan.ranks * stored.plan.intermediate,
        has_bias=fields.pop("has_bias", False),
        is_lora_enabled=False,
    )
    layer = nn.Module()
    attributes = {
        "layer_name": NAME,
        "global_num_experts": WIDTH,
        "activation": MoEActivation.SILU,
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
        "apply_router_weight_on_input": False,
        "expert_map_manager": SimpleNamespace(num_fused_shared_experts=0),
        "expert_map": None,
        **fields,
    }
    for name, value in attributes.items():
        setattr(layer, name, value)
    if experts is not None:
        mapped = [local.index(e) if e in local else -1 for e in range(WIDTH)]
        layer.expert_map = torch.tensor(mapped, dtype=torch.int32)
    layer._map_global_expert_id_to_local_expert_id = lambda expert: (
        local.index(expert) if expert in local else -1
    )
    method = Exl3ExpertsMethod(moe, NAME, stored.plan)
    method.create_weights(
        layer, len(local), HIDDEN, moe.intermediate_size // size, torch.float32
    )
    return layer, method


def load(layer, method, stored):
    """Loads what the rank holds; returns what did not arrive."""
    arrivals = Arrivals()
    for matrix, field, tensor in stored.tensors():
        if method.holds(matrix):
            arrivals.add(matrix, field, f"{matrix}.{field}")
            buffer = tensor.clone()
            method.load(layer, matrix, field, buffer)
            buffer.fill_(0)  # loaders may reuse their buffers
    return list(method.missing(arrivals))


@pytest.fixture
def tokens(rng):
    x = rng.standard_normal((5, HIDDEN))
    ids = np.stack([rng.permutation(WIDTH)[:2] for _ in range(5)])
    return x, ids, rng.uniform(0.2, 1, (5, 2))


def run(layer, method, tokens):
    x, ids, weights = tokens
    return method.apply(
        layer,
        torch.from_numpy(x).float(),
        torch.from_numpy(weights).float(),
        torch.from_numpy(ids),
        None,
        None,
    )


@pytest.mark.parametrize("shared_h", [False, True])
@pytest.mark.parametrize(
    ("ranks", "size", "intermediate"),
    [(1, 1, 256), (4, 4, 128), (4, 2, 128), (4, 1, 128), (2, 4, 256), (1, 2, 256)],
)
def test_any_number_of_ranks_gives_the_same(
    rng, tokens, ranks, size, intermediate, shared_h
):
    stored = Stored(rng, ranks, intermediate, shared_h=shared_h)
    total = 0
    for rank in range(size):
        layer, method = make_rank(stored, rank, size)
        assert load(layer, method, stored) == []
        total = total + run(layer, method, tokens)
    assert relative_error(total, stored.reference(*tokens)) < BOUND


def test_expert_parallel_ranks_hold_whole_experts(rng, tokens):
    stored = Stored(rng, ranks=2, intermediate=128)
    total = 0
    for experts in ([0, 3], [1], [2]):
        layer, method = make_rank(stored, experts=experts)
        assert load(layer, method, stored) == []
        total = total + run(layer, method, tokens)
    assert relative_error(total, stored.reference(*tokens)) < BOUND


@pytest.mark.parametrize("size", [1, 2])
def test_padding_of_the_intermediate_adds_nothing(rng, tokens, size):
    # Stored as 256, of which the last 64 decode to anything.
    stored = Stored(rng, sliced=False)
    total = 0
    for rank in range(size):
        layer, method = make_rank(stored, rank, size, intermediate=192)
        load(layer, method, stored)
        total = total + run(layer, method, tokens)
    assert relative_error(total, stored.reference(*tokens, size=192)) < BOUND


def test_the_layers_limit_is_the_ops(rng, tokens):
    stored = Stored(rng)
    layer, method = make_rank(stored, swiglu_limit=0.5)
    load(layer, method, stored)
    wanted = stored.reference(*tokens, limit=0.5)
    assert relative_error(run(layer, method, tokens), wanted) < BOUND


def test_a_slice_of_another_rank_is_not_wanted(rng):
    stored = Stored(rng, ranks=2, intermediate=128)
    _, method = make_rank(stored, rank=1, size=2, experts=None)
    assert not method.holds(ExpertMatrix(NAME, 0, "gate", 0))
    assert method.holds(ExpertMatrix(NAME, 0, "gate", 1))


@pytest.mark.parametrize("shared_h", [False, True])
def test_missing_tensors_are_named(rng, shared_h):
    stored = Stored(rng, ranks=2, intermediate=128, shared_h=shared_h)
    _, method = make_rank(stored)
    named = set(method.missing(Arrivals()))
    assert f"{NAME}.3.down_proj.rank1.trellis" in named
    assert (f"{NAME}.shared_h.up_proj.rank0.suh" in named) == shared_h
    assert (f"{NAME}.0.up_proj.rank0.suh" in named) != shared_h
    assert len(named) == sum(1 for _ in stored.tensors())


def test_a_damaged_tensor_is_named(rng):
    stored = Stored(rng, ranks=2, intermediate=128)
    layer, method = make_rank(stored)
    tensor = torch.zeros(8, 16, 48, dtype=torch.int16)
    with pytest.raises(TensorError, match=r"experts\.0\.gate_proj\.rank1\.trellis"):
        method.load(layer, ExpertMatrix(NAME, 0, "gate", 1), "trellis", tensor)


def test_ranks_that_cannot_share_are_refused_with_those_that_can(rng):
    stored = Stored(rng, ranks=2, intermediate=128)
    with pytest.raises(RankError, match=r"2 slices of 128.*by 4 ranks.*\[1, 2\]"):
        make_rank(stored, size=4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"activation": MoEActivation.GELU}, "activation gelu"),
        ({"swiglu_alpha": 1.7}, "swiglu_alpha 1.7"),
        ({"swiglu_beta": 1.0}, "swiglu_beta 1.0"),
        ({"apply_router_weight_on_input": True}, "router weights on the input"),
        ({"has_bias": True}, "biases of experts"),
        ({"eplb": True}, "--enable-eplb"),
    ],
)
def test_what_the_op_cannot_do_is_refused_by_name(rng, fields, says):
    with pytest.raises(RefusedOptionError, match=f"{NAME}: {says}: not supported"):
        make_rank(Stored(rng), **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"global_num_experts": 5}, "4 routed experts are stored.* needs 5"),
        ({"intermediate": 640}, "256 intermediate features are stored.* needs 640"),
    ],
)
def test_another_models_size_is_refused(rng, fields, says):
    with pytest.raises(TensorError, match=says):
        make_rank(Stored(rng), **fields)
