# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Linear layers of every kind, cut for every number of ranks.

The reference is the dense weight of `tests.reference_codec`, cut as upstream cuts a
dense layer. Results are float32 with the fast kernels' rounding, within
`tests.exl3_layers.error_bound`.
"""

import numpy as np
import pytest
import torch

from exl3.checkpoint.plan import CheckpointPlan
from exl3.format.errors import CheckpointError
from tests.exl3_layers import error_bound, make_layer, relative_error
from tests.exl3_stored import planned, stored_tensors
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.exl3.config import Exl3Config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

BOUND = error_bound(torch.float32, exact=False)
# words and codebook of the modules of a layer, one after another
RATES = [(64, 1), (40, 2), (96, 0)]


def make_layers(rng, shapes):
    return {
        name: make_layer(rng, k, n, *RATES[index % len(RATES)])
        for index, (name, (k, n)) in enumerate(shapes.items())
    }


def config_of(layers):
    return Exl3Config(
        CheckpointPlan(linears={name: planned(at) for name, at in layers.items()})
    )


def load(layer, layers):
    """Gives a layer its stored tensors, in memory that is overwritten afterwards."""
    for name, stored in layers.items():
        for field, tensor in stored_tensors(stored).items():
            buffer = tensor.clone()
            layer.quant_method.load(layer, name, field, buffer)
            buffer.fill_(0)


def run(layer, x):
    return layer.quant_method.apply(layer, torch.from_numpy(x).float(), None)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("features", [512, 384, 320])
def test_column_parallel(as_rank, rng, size, features):
    # 384 and 320 do not divide into whole blocks of 128, 320 not even as stored.
    layers = make_layers(rng, {"m.o": (256, -(-features // 128) * 128)})
    wanted = (x := rng.standard_normal((5, 256))) @ layers["m.o"].weight()
    part = features // size
    for rank in range(size):
        as_rank(rank, size)
        layer = ColumnParallelLinear(
            256, features, bias=False, quant_config=config_of(layers), prefix="m.o"
        )
        load(layer, layers)
        got = run(layer, x)
        assert got.shape == (5, part)
        mine = wanted[:, rank * part : (rank + 1) * part]
        assert relative_error(got, mine) < BOUND


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("features", [512, 384, 320])
def test_row_parallel(as_rank, rng, size, features):
    layers = make_layers(rng, {"m.o": (-(-features // 128) * 128, 256)})
    x = rng.standard_normal((5, features))
    wanted = x @ layers["m.o"].weight()[:features]
    part, total = features // size, 0
    for rank in range(size):
        as_rank(rank, size)
        layer = RowParallelLinear(
            features, 256, bias=False, quant_config=config_of(layers), prefix="m.o"
        )
        load(layer, layers)
        total = total + run(layer, x[:, rank * part : (rank + 1) * part])
    assert relative_error(total, wanted) < BOUND


def merged_layer(layers):
    """Two outputs of 320 features, of which no rank's part is whole blocks."""
    layer = MergedColumnParallelLinear(
        256,
        [320, 320],
        bias=False,
        quant_config=config_of(layers),
        prefix="m.gate_up_proj",
    )
    load(layer, layers)
    return layer


@pytest.mark.parametrize("size", [1, 2])
def test_merged_outputs_keep_their_own_rates_and_scales(as_rank, rng, size):
    layers = make_layers(rng, {"m.gate_proj": (256, 384), "m.up_proj": (256, 384)})
    x = rng.standard_normal((3, 256))
    for rank in range(size):
        as_rank(rank, size)
        layer = merged_layer(layers)
        part = 320 // size
        mine = slice(rank * part, (rank + 1) * part)
        wanted = np.concatenate(
            [(x @ stored.weight())[:, mine] for stored in layers.values()], axis=1
        )
        assert relative_error(run(layer, x), wanted) < BOUND


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_ranks_share_heads_of_keys_and_values(as_rank, rng, size, kv_heads):
    heads, head_size = 4, 64
    stored_kv = -(-kv_heads * head_size // 128) * 128
    layers = make_layers(
        rng,
        {
            "a.q_proj": (256, heads * head_size),
            "a.k_proj": (256, stored_kv),
            "a.v_proj": (256, stored_kv),
        },
    )
    x = rng.standard_normal((3, 256))
    dense = [x @ stored.weight() for stored in layers.values()]
    for rank in range(size):
        as_rank(rank, size)
        layer = QKVParallelLinear(
            256,
            head_size,
            heads,
            kv_heads,
            bias=False,
            quant_config=config_of(layers),
            prefix="a.qkv_proj",
        )
        load(layer, layers)
        q = heads // size * head_size
        kv = max(1, kv_heads // size) * head_size
        first = rank * kv_heads // size * head_size
        wanted = np.concatenate(
            [
                dense[0][:, rank * q : (rank + 1) * q],
                dense[1][:, first : first + kv],
                dense[2][:, first : first + kv],
            ],
            axis=1,
        )
        assert relative_error(run(layer, x), wanted) < BOUND


@pytest.mark.parametrize("size", [1, 2])
def test_one_matrix_may_hold_several_outputs(as_rank, rng, size):
    layers = make_layers(rng, {"m.gate_up_proj": (256, 640)})
    x = rng.standard_normal((3, 256))
    dense = x @ layers["m.gate_up_proj"].weight()
    for rank in range(size):
        as_rank(rank, size)
        layer = merged_layer(layers)
        part = 320 // size
        wanted = [
            dense[:, start + rank * part : start + (rank + 1) * part]
            for start in (0, 320)
        ]
        assert relative_error(run(layer, x), np.concatenate(wanted, 1)) < BOUND


def test_the_first_of_two_matrices_may_hold_several_outputs(as_rank, rng):
    layers = make_layers(rng, {"m.in_proj_qkv": (128, 512), "m.in_proj_z": (128, 256)})
    x = rng.standard_normal((3, 128))
    layer = MergedColumnParallelLinear(
        128,
        [128, 128, 256, 256],
        bias=False,
        quant_config=config_of(layers),
        prefix="m.in_proj_qkvz",
    )
    load(layer, layers)
    wanted = np.concatenate([x @ stored.weight() for stored in layers.values()], 1)
    assert relative_error(run(layer, x), wanted) < BOUND


@pytest.mark.parametrize("size", [1, 2])
def test_a_replicated_layer_is_whole_on_every_rank(as_rank, rng, size):
    layers = make_layers(rng, {"m.o": (128, 256)})
    x = rng.standard_normal((3, 128))
    as_rank(size - 1, size)
    layer = ReplicatedLinear(
        128, 256, bias=False, quant_config=config_of(layers), prefix="m.o"
    )
    load(layer, layers)
    assert relative_error(run(layer, x), x @ layers["m.o"].weight()) < BOUND


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_head_gives_every_rank_its_vocabulary(as_rank, rng, size):
    vocabulary = 300  # 320 in vLLM, 384 as stored
    layers = make_layers(rng, {"lm_head": (128, 384)})
    x = rng.standard_normal((3, 128))
    parts = []
    for rank in range(size):
        as_rank(rank, size)
        head = ParallelLMHead(
            vocabulary, 128, quant_config=config_of(layers), prefix="lm_head"
        )
        load(head, layers)
        parts.append(run(head, x))
        assert parts[-1].shape == (3, 320 // size)
    logits = torch.cat(parts, 1)
    assert torch.isfinite(logits).all()
    wanted = (x @ layers["lm_head"].weight())[:, :vocabulary]
    assert relative_error(logits[:, :vocabulary], wanted) < BOUND


def test_the_identity_gives_back_the_weight(as_rank, rng):
    # MLA takes kv_b_proj apart so, and asks for its device by `weight_packed`.
    layers = make_layers(rng, {"a.kv_b_proj": (512, 256)})
    layer = ColumnParallelLinear(
        512, 256, bias=False, quant_config=config_of(layers), prefix="a.kv_b_proj"
    )
    load(layer, layers)
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        get_and_maybe_dequant_weights,
    )

    got = get_and_maybe_dequant_weights(layer)
    assert relative_error(got.T, layers["a.kv_b_proj"].weight()) < BOUND


@pytest.mark.parametrize("side", ["su", "sv"])
def test_packed_signs_are_unpacked(as_rank, rng, side):
    stored = make_layer(rng, 128, 256, 64, 1)
    field = f"{side}h"
    signs = np.where(getattr(stored, field) < 0, -1, 1).astype(np.float16)
    object.__setattr__(stored, field, signs)
    layer = ColumnParallelLinear(
        128, 256, bias=False, quant_config=config_of({"m.o": stored}), prefix="m.o"
    )
    tensors = stored_tensors(stored)
    packed = np.packbits(signs < 0, bitorder="little").view(np.int16)
    del tensors[field]
    tensors[side] = torch.from_numpy(packed)
    for name, tensor in tensors.items():
        layer.quant_method.load(layer, "m.o", name, tensor)
    x = rng.standard_normal((2, 128))
    assert relative_error(run(layer, x), x @ stored.weight()) < BOUND


@pytest.mark.parametrize(
    ("field", "damage", "says"),
    [
        ("trellis", lambda t: t[:-1], r"m\.o\.trellis.*\[7, 16, 64\].*\[8, 16, 64\]"),
        ("trellis", lambda t: t.int(), r"m\.o\.trellis.*int32.*int16"),
        ("suh", lambda t: t[:-1], r"m\.o\.suh.*\[127\].*\[128\]"),
        ("svh", lambda t: t.float(), r"m\.o\.svh.*float32.*float16"),
        ("svh", lambda t: t / 0, r"m\.o\.svh: holds NaN or infinity"),
        ("mcg", lambda t: t + 1, r"m\.o\.mcg is -877912082; mcg has 3417055213"),
        ("mcg", lambda t: t.repeat(2), r"m\.o\.mcg is \[-877912083, -877912083\]"),
    ],
)
def test_a_damaged_tensor_is_named(as_rank, rng, field, damage, says):
    layers = {"m.o": make_layer(rng, 128, 256, 64, 1)}
    layer = ColumnParallelLinear(
        128, 256, bias=False, quant_config=config_of(layers), prefix="m.o"
    )
    tensor = damage(stored_tensors(layers["m.o"])[field])
    with pytest.raises(CheckpointError, match=says):
        layer.quant_method.load(layer, "m.o", field, tensor)


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        (256, 256, r"m\.o\.trellis: 128 in-features are stored.*has 256"),
        (128, 300, r"m\.o\.trellis: 256 out-features.*has 300.*stored as 384"),
    ],
)
def test_another_models_size_is_refused(as_rank, rng, inputs, outputs, says):
    layers = {"m.o": make_layer(rng, 128, 256, 64, 1)}
    with pytest.raises(CheckpointError, match=says):
        ColumnParallelLinear(
            inputs, outputs, bias=False, quant_config=config_of(layers), prefix="m.o"
        )
