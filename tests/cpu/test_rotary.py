# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The CPU's rotary embeddings, for every layout in which models pass q and k."""

import functools
from collections.abc import Callable

import pytest
import torch

from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.fope import FourierRotaryEmbedding
from vllm.platforms import current_platform

HEADS, HEAD_SIZE, TOKENS, MAX_POSITION = 4, 64, 6, 128

Draw = Callable[..., torch.Tensor]
# For each layout: the shape of `positions`, then how to draw a query or a key of so
# many heads.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Draw, int], torch.Tensor]]] = {
    "rows": ((6,), lambda draw, heads: draw(6, heads * HEAD_SIZE)),
    "rows of a fused projection": (
        (6,),
        lambda draw, heads: draw(6, 96 + heads * HEAD_SIZE)[:, 96:],
    ),
    "every second column": (
        (6,),
        lambda draw, heads: draw(6, 2 * heads * HEAD_SIZE)[:, ::2],
    ),
    "heads": ((6,), lambda draw, heads: draw(6, heads, HEAD_SIZE)),
    "heads of a fused projection": (
        (6,),
        lambda draw, heads: draw(6, 96 + heads * HEAD_SIZE)[:, 96:].unflatten(
            1, (heads, HEAD_SIZE)
        ),
    ),
    "tail of each head": (
        (6,),
        lambda draw, heads: draw(6, heads, 128 + HEAD_SIZE)[..., 128:],
    ),
    "heads first": (
        (6,),
        lambda draw, heads: draw(heads, 6, HEAD_SIZE).transpose(0, 1),
    ),
    "batch of rows": ((2, 3), lambda draw, heads: draw(2, 3, heads * HEAD_SIZE)),
    "batch of heads": ((2, 3), lambda draw, heads: draw(2, 3, heads, HEAD_SIZE)),
    "batch, heads first": (
        (2, 3),
        lambda draw, heads: draw(2, heads, 3, HEAD_SIZE).transpose(1, 2),
    ),
    "flat positions for a batch of one": (
        (6,),
        lambda draw, heads: draw(1, 6, heads, HEAD_SIZE),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _ops():
    current_platform.import_kernels()


@functools.cache
def eager_config():
    # Eager mode switches all custom ops on.
    return VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))


def make_rope(cls=RotaryEmbedding, rotary_dim=HEAD_SIZE, *, neox, dtype, **arguments):
    with set_current_vllm_config(eager_config()):
        return cls(
            head_size=HEAD_SIZE,
            rotary_dim=rotary_dim,
            max_position_embeddings=MAX_POSITION,
            base=10000.0,
            is_neox_style=neox,
            dtype=dtype,
            **arguments,
        )


def rotate(x, positions, cos_sin, *, neox):
    """Rotary embeddings by their definition: pairs of features as complex numbers.

    Args:
        x: Any shape that holds the heads of each token of `positions`.
        positions: int64.
        cos_sin: `[max_position, rotary_dim]`: cosines, then sines.
        neox: A pair is features (i, i + rotary_dim / 2), else (2i, 2i + 1).

    Returns:
        float64 in the shape of `x`.
    """
    rotary_dim = cos_sin.shape[1]
    out = x.double().reshape(positions.numel(), -1, HEAD_SIZE).clone()
    cos, sin = cos_sin.double()[positions.flatten()].chunk(2, dim=-1)
    turn = torch.complex(cos, sin)[:, None]
    half = rotary_dim // 2
    first = slice(0, half) if neox else slice(0, rotary_dim, 2)
    second = slice(half, rotary_dim) if neox else slice(1, rotary_dim, 2)
    turned = torch.complex(out[..., first], out[..., second]) * turn
    out[..., first], out[..., second] = turned.real, turned.imag
    return out.reshape(x.shape)


def assert_rotated(actual, expected, dtype):
    # |x cos - y sin| is about 5 at most. The op computes in float32 and rounds once;
    # the native path rounds the two products and their difference, each by half an
    # eps at most.
    bound = {torch.float32: 2e-6, torch.bfloat16: 5 * 3 * 2**-9}[dtype]
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("key_heads", [2, 1, None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_op_and_native_path_rotate_every_layout(layout, key_heads, neox, dtype):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    positions_shape, make = LAYOUTS[layout]
    rope = make_rope(neox=neox, dtype=dtype)
    positions = torch.randint(MAX_POSITION, positions_shape, generator=generator)
    query = make(draw, HEADS)
    key = None if key_heads is None else make(draw, key_heads)
    expected = [
        None if x is None else rotate(x, positions, rope.cos_sin_cache, neox=neox)
        for x in (query, key)
    ]

    # The native path views its arguments, so it gets dense copies.
    native = rope.forward_native(
        positions, query.contiguous(), None if key is None else key.contiguous()
    )
    by_op = rope.forward(positions, query, key)

    assert rope._forward_method.__name__ == "forward_cpu"
    for actual in by_op, native:
        assert_rotated(actual[0], expected[0], dtype)
        if key is None:
            assert actual[1] is None
        else:
            assert_rotated(actual[1], expected[1], dtype)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_only_the_rotary_part_of_a_head_turns(neox):
    rope = make_rope(rotary_dim=32, neox=neox, dtype=torch.float32)
    positions = torch.arange(TOKENS)
    query, key = torch.randn(TOKENS, HEADS, HEAD_SIZE), torch.randn(TOKENS, HEAD_SIZE)
    expected = [
        rotate(x, positions, rope.cos_sin_cache, neox=neox) for x in (query, key)
    ]

    actual = rope.forward(positions, query, key)

    assert_rotated(actual[0], expected[0], torch.float32)
    assert_rotated(actual[1], expected[1], torch.float32)


def test_gaps_in_memory_stay_untouched():
    """Stock writes to what lies between the features of a query."""
    rope = make_rope(neox=False, dtype=torch.float32)
    buffer = torch.randn(TOKENS, 2 * HEADS * HEAD_SIZE)
    gaps = buffer[:, 1::2].clone()

    rope.forward(torch.arange(1, TOKENS + 1), buffer[:, ::2], None)

    assert torch.equal(buffer[:, 1::2], gaps)


def test_rows_are_rotated_without_a_copy():
    """Queries and keys that lie in rows are the common case, and cost no copy."""
    rope = make_rope(neox=True, dtype=torch.float32)
    fused = torch.randn(TOKENS, 6 * HEAD_SIZE)
    query, key = fused.split([4 * HEAD_SIZE, 2 * HEAD_SIZE], dim=-1)
    heads = query.unflatten(1, (HEADS, HEAD_SIZE))

    by_rows = rope.forward(torch.arange(TOKENS), query, key)
    by_heads = rope.forward(torch.arange(TOKENS), heads, None)

    assert by_rows[0].data_ptr() == query.data_ptr()
    assert by_rows[1].data_ptr() == key.data_ptr()
    assert by_heads[0].data_ptr() == query.data_ptr()


def test_a_subclass_with_other_arithmetic_keeps_it():
    """Fourier embeddings have a table that the plain op would misread."""
    rope = make_rope(
        FourierRotaryEmbedding,
        neox=True,
        dtype=torch.float32,
        init_cache=False,
        num_key_value_heads=2,
        num_inv_freq=8,
        fope_sep_head=True,
        fope_init_factor=1.0,
    )
    torch.nn.init.normal_(rope.cos_coef)
    torch.nn.init.normal_(rope.sin_coef)
    query, key = torch.randn(2, TOKENS, 2 * HEAD_SIZE)
    positions = torch.arange(TOKENS)
    expected = rope.forward_native(positions, query.clone(), key.clone())

    actual = rope.forward(positions, query, key)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
