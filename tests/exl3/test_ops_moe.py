# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The moe op against float64 experts with independently decoded weights."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import library

from exl3 import ops
from tests.exl3_layers import (
    DTYPES,
    Layer,
    error_bound,
    make_layer,
    relative_error,
)

HIDDEN = 256
INTERMEDIATE = 128

#: Words and codebook of gate, up and down; experts take them in turn.
MIXED = [
    ((32, 1), (48, 1), (64, 1)),
    ((96, 2), (96, 2), (40, 2)),
    ((48, 0), (48, 0), (48, 0)),
    ((64, 1), (32, 2), (96, 0)),
]


@dataclass(frozen=True)
class Experts:
    """Virtual experts: gate, up and down of each, and how many make one expert."""

    virtual: list[tuple[Layer, Layer, Layer]]
    slices: int

    def arguments(self) -> dict:
        """The op's tensors. The order of matrices in the slabs is not the experts'."""
        slabs: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        ends = [0, 0]
        table = np.zeros((len(self.virtual), 3, 3), np.int64)
        for index in reversed(range(len(self.virtual))):
            for projection, layer in enumerate(self.virtual[index]):
                slab = int(projection == 2)
                table[index, projection] = ends[slab], layer.words, layer.codebook
                slabs[slab].append(layer.slab())
                ends[slab] += slabs[slab][-1].numel()

        def stack(projections, side):
            vectors = [
                [getattr(layers[p], side) for p in projections]
                for layers in self.virtual
            ]
            return torch.from_numpy(np.array(vectors))

        return {
            "w13": torch.cat(slabs[0]),
            "w2": torch.cat(slabs[1]),
            "experts": torch.from_numpy(table),
            "suh13": stack([0, 1], "suh"),
            "svh13": stack([0, 1], "svh"),
            "suh2": stack([2], "suh").squeeze(1),
            "svh2": stack([2], "svh").squeeze(1),
            "slices": self.slices,
        }

    def reference(self, x, ids, weights, expert_map=None, limit=math.inf):
        """float64 [tokens, features]."""
        rows = np.zeros((x.shape[0], HIDDEN))
        rows[:, : x.shape[1]] = x.double().numpy()
        out = np.zeros_like(rows)
        dense = [[layer.weight() for layer in layers] for layers in self.virtual]
        for (token, slot), expert in np.ndenumerate(ids.numpy()):
            local = expert_map[expert] if expert_map is not None else expert
            if expert < 0 or local < 0:
                continue
            for slice_ in range(self.slices):
                gate, up, down = dense[int(local) * self.slices + slice_]
                g = np.minimum(rows[token] @ gate, limit)
                u = np.clip(rows[token] @ up, -limit, limit)
                y = (g / (1 + np.exp(-g)) * u) @ down
                out[token] += float(weights[token, slot]) * y
        return out[:, : x.shape[1]]


def make_experts(rng, count, slices=1, rates=MIXED, intermediate=INTERMEDIATE):
    virtual = []
    for index in range(count * slices):
        gate, up, down = rates[index % len(rates)]
        virtual.append(
            (
                make_layer(rng, HIDDEN, intermediate, *gate),
                make_layer(rng, HIDDEN, intermediate, *up),
                make_layer(rng, intermediate, HIDDEN, *down),
            )
        )
    return Experts(virtual, slices)


def draw(rng, tokens, width=HIDDEN, dtype=torch.float32):
    return torch.from_numpy(rng.standard_normal((tokens, width))).to(dtype)


def draw_routes(rng, tokens, top_k, experts):
    ids = [rng.permutation(experts)[:top_k] for _ in range(tokens)]
    weights = rng.uniform(0.1, 1, (tokens, top_k))
    return (
        torch.from_numpy(np.array(ids, np.int32).reshape(tokens, top_k)),
        torch.from_numpy(weights.astype(np.float32)),
    )


def check(experts, x, ids, weights, expert_map=None, limit=math.inf):
    """Compares both modes with the reference; returns the fast one's result."""
    tensor_map = None if expert_map is None else torch.tensor(expert_map).int()
    wanted = experts.reference(x, ids, weights, expert_map, limit)
    for exact in (True, False):
        got = ops.moe(
            x,
            ids,
            weights,
            expert_map=tensor_map,
            limit=limit,
            exact=exact,
            **experts.arguments(),
        )
        assert got.dtype == x.dtype and got.shape == x.shape
        if wanted.any():
            # Gate and up, their product, down: errors of three products add up.
            assert relative_error(got, wanted) < error_bound(x.dtype, exact, chain=3)
        else:
            assert not got.any()
    return got


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 9, 33])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("experts", [1, 5, 28])
def test_widths_and_tokens(experts, top_k, tokens):
    if top_k > experts:
        top_k = experts
    rng = np.random.default_rng(100 * experts + 10 * top_k + tokens)
    check(
        make_experts(rng, experts),
        draw(rng, tokens),
        *draw_routes(rng, tokens, top_k, experts),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_are_summed(slices, dtype):
    rng = np.random.default_rng(slices)
    experts = make_experts(rng, 3, slices)
    check(experts, draw(rng, 6, dtype=dtype), *draw_routes(rng, 6, 2, 3))


def test_all_tokens_to_one_expert():
    rng = np.random.default_rng(1)
    ids = torch.full((200, 1), 2)
    check(make_experts(rng, 5), draw(rng, 200), ids, torch.ones(200, 1))


def test_many_batches():
    """More rows than the scratch of one batch holds."""
    rng = np.random.default_rng(2)
    experts = make_experts(rng, 28, intermediate=1024)
    x, (ids, weights) = draw(rng, 600), draw_routes(rng, 600, 6, 28)
    got = check(experts, x, ids, weights)
    for token in (0, 299, 599):
        alone = ops.moe(
            x[token : token + 1],
            ids[token : token + 1],
            weights[token : token + 1],
            **experts.arguments(),
        )
        assert relative_error(alone, got[token : token + 1].double().numpy()) < 5e-4


def test_expert_map_and_skipped_routes():
    """Global experts 0 to 5, of which this rank has 1, 3 and 4; -1 pads the routes."""
    rng = np.random.default_rng(3)
    ids = torch.tensor([[0, 1], [3, 4], [4, 1], [-1, 3], [2, 5], [-1, -1]])
    weights = torch.from_numpy(rng.uniform(0, 1, (6, 2))).float()
    expert_map = [-1, 0, -1, 2, 1, -1]
    got = check(make_experts(rng, 3), draw(rng, 6), ids, weights, expert_map)
    assert not got[4:].any()


def test_routed_weight_zero_and_one_expert_twice():
    rng = np.random.default_rng(4)
    ids = torch.tensor([[0, 1], [1, 1], [2, 0]])
    weights = torch.tensor([[0.0, 1.0], [0.25, 0.5], [0.0, 0.0]])
    got = check(make_experts(rng, 3), draw(rng, 3), ids, weights)
    assert not got[2].any()


@pytest.mark.parametrize("limit", [0.25, 1.5])
def test_limit(limit):
    rng = np.random.default_rng(5)
    experts, x = make_experts(rng, 4), draw(rng, 9)
    ids, weights = draw_routes(rng, 9, 2, 4)
    limited = check(experts, x, ids, weights, limit=limit)
    free = ops.moe(x, ids, weights, **experts.arguments())
    assert (limited - free).abs().max() > 0.01


@pytest.mark.parametrize("width", [3, 130, 255])
def test_x_narrower_than_stored(width):
    rng = np.random.default_rng(width)
    check(make_experts(rng, 4), draw(rng, 5, width), *draw_routes(rng, 5, 2, 4))


def test_strides():
    rng = np.random.default_rng(6)
    experts, x = make_experts(rng, 4), draw(rng, 6, 2 * HIDDEN)
    ids, weights = draw_routes(rng, 6, 3, 4)
    wanted = ops.moe(
        x[:, :HIDDEN].contiguous(),
        ids[:, :2].contiguous(),
        weights[:, :2].contiguous(),
        **experts.arguments(),
    )
    got = ops.moe(x[:, :HIDDEN], ids[:, :2], weights[:, :2], **experts.arguments())
    assert torch.equal(got, wanted)
    assert torch.equal(
        ops.moe(
            x[:, :HIDDEN], ids[:, :2].long(), weights[:, :2], **experts.arguments()
        ),
        wanted,
    )


def test_runs_repeat_bit_for_bit():
    rng = np.random.default_rng(7)
    experts, x = make_experts(rng, 8, 2), draw(rng, 40, dtype=torch.bfloat16)
    ids, weights = draw_routes(rng, 40, 4, 8)
    first = ops.moe(x, ids, weights, **experts.arguments())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        again = ops.moe(x, ids, weights, **experts.arguments())
        assert torch.equal(again, first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"topk_ids": torch.tensor([[0, 4]])}, "has expert 4 for token 0"),
        ({"topk_ids": torch.tensor([[-2, 0]])}, "has expert -2 for token 0"),
        ({"topk_ids": torch.tensor([[2**40, 0]])}, "has expert 1099511627776"),
        ({"topk_ids": torch.zeros(2, 2).int()}, r"topk_ids has shape \[2, 2\] for 1"),
        ({"topk_ids": torch.zeros(1, 2)}, "topk_ids is Float"),
        ({"topk_weights": torch.zeros(1, 3)}, r"topk_weights has shape \[1, 3\]"),
        ({"topk_weights": torch.zeros(1, 2).half()}, "topk_weights is Half"),
        ({"expert_map": torch.tensor([0, 1, 2, 4]).int()}, "expert 3 to 4"),
        ({"expert_map": torch.tensor([0, 1, 2, -2]).int()}, "expert 3 to -2"),
        ({"expert_map": torch.tensor([0, 1, 2, 3])}, "expert_map is Long"),
        ({"slices": 3}, "4 virtual experts are no whole number of experts of 3"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
        ({"limit": 0.0}, "limit is 0"),
        ({"x": torch.zeros(1, HIDDEN + 1)}, "x has 257 features"),
        ({"x": torch.zeros(HIDDEN)}, r"x has shape \[256\]"),
        ({"w2": torch.zeros(7, dtype=torch.int16)}, "the slab has 7"),
        ({"svh2": torch.zeros(4, 128).half()}, r"svh2 has shape \[4, 128\]"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    rng = np.random.default_rng(8)
    arguments = {
        "x": torch.zeros(1, HIDDEN),
        "topk_ids": torch.tensor([[1, 3]]),
        "topk_weights": torch.ones(1, 2),
        **make_experts(rng, 4).arguments(),
    }
    ops.moe(**arguments)
    with pytest.raises(RuntimeError, match=message):
        ops.moe(**{**arguments, **change})


def test_refuses_a_matrix_beyond_its_slab():
    rng = np.random.default_rng(9)
    arguments = make_experts(rng, 2).arguments()
    x, (ids, weights) = draw(rng, 1), draw_routes(rng, 1, 1, 2)
    for offset in (-1, arguments["w13"].numel() - 1, 2**62):
        table = arguments["experts"].clone()
        table[0, 0, 0] = offset
        with pytest.raises(RuntimeError, match=f"from offset {offset}"):
            ops.moe(x, ids, weights, **{**arguments, "experts": table})


def test_compiles_whole_with_any_number_of_tokens():
    rng = np.random.default_rng(10)
    arguments = make_experts(rng, 4).arguments()

    def layer(x, ids, weights):
        return ops.moe(x, ids, weights, **arguments) + x

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 3, 9):
        x = draw(rng, tokens, dtype=torch.bfloat16)
        ids, weights = draw_routes(rng, tokens, 2, 4)
        assert torch.equal(compiled(x, ids, weights), layer(x, ids, weights))


def test_opcheck():
    rng = np.random.default_rng(11)
    experts = make_experts(rng, 2).arguments()
    arguments = (draw(rng, 2), *draw_routes(rng, 2, 1, 2))
    options = {"expert_map": None, "activation": "silu", "limit": math.inf}
    library.opcheck(torch.ops.exl3.moe, arguments, {**experts, **options})
