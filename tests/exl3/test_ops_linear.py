# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The linear op against float64 products with independently decoded weights."""

import itertools

import numpy as np
import pytest
import torch
from torch import library

from exl3 import ops
from tests.exl3_layers import (
    DTYPES,
    ISAS,
    RATES,
    error_bound,
    linear_arguments,
    make_layer,
    relative_error,
)

ROWS = [0, 1, 2, 3, 5, 8, 9, 17, 64, 130]


def draw(rng, rows, width, dtype):
    return torch.from_numpy(rng.standard_normal((rows, width))).to(dtype)


def dense(x, layers):
    """float64 products with each layer's weight, side by side."""
    padded = np.zeros((x.shape[0], layers[0].in_features))
    padded[:, : x.shape[1]] = x.double().numpy()
    return np.concatenate([padded @ layer.weight() for layer in layers], axis=1)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("words, codebook", RATES)
def test_every_rate_and_dtype(monkeypatch, words, codebook, exact):
    rng = np.random.default_rng(words + codebook)
    layer = make_layer(rng, 384, 256, words, codebook)
    weight, arguments = layer.weight(), linear_arguments([layer])
    for dtype in DTYPES:
        for rows in (1, 5, 20):
            x = draw(rng, rows, 384, dtype)
            wanted = x.double().numpy() @ weight
            for isa in ISAS:
                monkeypatch.setenv("EXL3_CPU_ISA", isa)
                got = ops.linear(x, bias=None, exact=exact, **arguments)
                assert got.dtype == dtype
                error = relative_error(got, wanted)
                assert error < error_bound(dtype, exact), (dtype, rows, isa)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("codebook", [1, 2])
def test_any_number_of_rows(monkeypatch, rows, codebook):
    rng = np.random.default_rng(rows)
    layer = make_layer(rng, 640, 128, 48, codebook)
    x = draw(rng, rows, 640, torch.float32)
    wanted = dense(x, [layer])
    for isa, exact in itertools.product(ISAS, (True, False)):
        monkeypatch.setenv("EXL3_CPU_ISA", isa)
        got = ops.linear(x, bias=None, exact=exact, **linear_arguments([layer]))
        assert got.shape == (rows, 128)
        if rows:
            assert relative_error(got, wanted) < error_bound(x.dtype, exact), isa


@pytest.mark.parametrize("k, n", [(128, 128), (128, 1152), (2176, 128), (4224, 384)])
@pytest.mark.parametrize("codebook", [1, 2])
def test_any_multiple_of_128(monkeypatch, k, n, codebook):
    rng = np.random.default_rng(k + n)
    layer = make_layer(rng, k, n, 64, codebook)
    x = draw(rng, 7, k, torch.float32)
    wanted = dense(x, [layer])
    for isa, exact in itertools.product(ISAS, (True, False)):
        monkeypatch.setenv("EXL3_CPU_ISA", isa)
        got = ops.linear(x, bias=None, exact=exact, **linear_arguments([layer]))
        assert relative_error(got, wanted) < error_bound(x.dtype, exact), isa


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_shards_differ_in_everything(dtype, rows):
    """Columns are kept in part, also where no block of 128 begins or ends."""
    rng = np.random.default_rng(rows)
    layers = [
        make_layer(rng, 256, 384, 48, 1),
        make_layer(rng, 256, 128, 40, 2),
        make_layer(rng, 256, 256, 128, 0),
        make_layer(rng, 256, 128, 16, 2),
    ]
    columns = [(128, 200), (0, 128), (30, 77), (128, 0)]
    x = draw(rng, rows, 256, dtype)
    bias = draw(rng, 1, sum(keep for _, keep in columns), dtype)[0]
    wanted = np.concatenate(
        [
            dense(x, [layer])[:, skip : skip + keep]
            for layer, (skip, keep) in zip(layers, columns)
        ],
        axis=1,
    )
    got = ops.linear(x, bias=bias, **linear_arguments(layers, columns))
    wanted = wanted + bias.double().numpy()
    assert relative_error(got, wanted) < error_bound(dtype, exact=False)


@pytest.mark.parametrize("width", [1, 100, 129, 255])
def test_x_narrower_than_stored(width):
    rng = np.random.default_rng(width)
    layer = make_layer(rng, 384, 128, 64, 2)
    x = draw(rng, 3, width, torch.bfloat16)
    got = ops.linear(x, bias=None, **linear_arguments([layer]))
    assert relative_error(got, dense(x, [layer])) < error_bound(x.dtype, exact=False)


@pytest.mark.parametrize("isa", ISAS)
def test_exact_weights_are_the_formats(monkeypatch, isa):
    """A unit vector in the rotated domain picks single decoded values, bit for bit."""
    monkeypatch.setenv("EXL3_CPU_ISA", isa)
    rng = np.random.default_rng(0)
    for words, codebook in RATES:
        layer = make_layer(rng, 128, 128, words, codebook)
        layer.suh[:] = 1
        layer.svh[:] = 1
        rotated = torch.eye(128)  # both rotations are their own inverses
        x = ops.hadamard(rotated)
        got = ops.hadamard(
            ops.linear(x, bias=None, exact=True, **linear_arguments([layer]))
        )
        error = np.abs(got.double().numpy() - layer.inner().astype(np.float64)).max()
        assert error < 4 * 2**-21, (words, codebook)  # float32 rotations of values < 4


def test_strides_and_batch_dimensions():
    rng = np.random.default_rng(1)
    layer = make_layer(rng, 256, 128, 64, 1)
    arguments = linear_arguments([layer])
    x = draw(rng, 12, 512, torch.float32)
    wanted = ops.linear(x[:, 128:384].contiguous(), bias=None, **arguments)
    assert torch.equal(ops.linear(x[:, 128:384], bias=None, **arguments), wanted)
    folded = x[:, 128:384].contiguous().view(3, 4, 256)
    got = ops.linear(folded, bias=None, **arguments)
    assert torch.equal(got, wanted.view(3, 4, 128))
    backwards = folded.transpose(0, 1)
    got = ops.linear(backwards, bias=None, **arguments)
    assert torch.equal(got, wanted.view(3, 4, 128).transpose(0, 1))
    one = ops.linear(folded[0, 0], bias=None, **arguments)
    assert one.shape == (128,)


@pytest.mark.parametrize("isa", ISAS)
def test_runs_repeat_bit_for_bit(monkeypatch, isa):
    monkeypatch.setenv("EXL3_CPU_ISA", isa)
    rng = np.random.default_rng(2)
    layer = make_layer(rng, 512, 512, 48, 2)
    arguments = linear_arguments([layer])
    for rows in (1, 7, 150):
        x = draw(rng, rows, 512, torch.bfloat16)
        first = ops.linear(x, bias=None, **arguments)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            assert torch.equal(ops.linear(x, bias=None, **arguments), first)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codebook", [1, 2])
def test_a_row_alone_is_the_row_in_a_batch(monkeypatch, isa, codebook):
    """Bit for bit: of exact products always, of others among up to 7 rows."""
    monkeypatch.setenv("EXL3_CPU_ISA", isa)
    rng = np.random.default_rng(11)
    layer = make_layer(rng, 640, 128, 48, codebook)
    x = draw(rng, 150, 640, torch.float32)
    for exact, rows in ((True, 150), (False, 7)):
        options = {"bias": None, "exact": exact, **linear_arguments([layer])}
        batch = ops.linear(x[:rows], **options)
        for row in (0, 1, 4, rows - 1):
            assert torch.equal(ops.linear(x[row : row + 1], **options)[0], batch[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codebook", [1, 2])
def test_infinities_and_nan_stay_in_their_row(monkeypatch, isa, codebook):
    monkeypatch.setenv("EXL3_CPU_ISA", isa)
    rng = np.random.default_rng(6)
    layer = make_layer(rng, 256, 128, 64, codebook)
    x = draw(rng, 20, 256, torch.float32)  # so many that AMX takes part
    x[1, 7], x[3, 200] = np.inf, np.nan
    x[4] = 0
    got = ops.linear(x, bias=None, **linear_arguments([layer]))
    assert got[[0, 2]].isfinite().all()
    assert not got[[1, 3]].isfinite().any()
    assert not got[4].any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 256, dtype=torch.float64)}, "x is Double"),
        ({"x": torch.zeros(2, 512)}, "x has 512 features; the weights store 256"),
        ({"shards": [128, 0, 128, 64]}, "shards has 4 numbers"),
        ({"shards": [128, 64, 128, 64, 1]}, "keeps columns 64 to 192 of 128"),
        ({"shards": [128, 0, 128, 63, 1]}, "63 words a tile with codebook 1"),
        ({"shards": [128, 0, 128, 24, 1]}, "24 words a tile with codebook 1"),
        ({"shards": [128, 0, 128, 64, 3]}, "64 words a tile with codebook 3"),
        ({"shards": [128, 0, 128, 48, 1]}, "trellis has 8192 words"),
        ({"shards": [256, 0, 128, 64, 1]}, "the slab has 8192"),
        ({"shards": [100, 0, 100, 64, 1]}, "stored n is 100"),
        ({"suh": torch.zeros(2, 256).half()}, r"suh has shape \[2, 256\]"),
        ({"suh": torch.zeros(1, 256)}, "suh is Float; expected Half"),
        ({"svh": torch.zeros(256).half()}, r"svh has shape \[256\]; expected \[128\]"),
        ({"bias": torch.zeros(127)}, r"bias has shape \[127\]; expected \[128\]"),
        ({"bias": torch.zeros(128).half()}, "bias is Half; expected Float"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    layer = make_layer(np.random.default_rng(3), 256, 128, 64, 1)
    arguments = {"x": torch.zeros(2, 256), "bias": None, **linear_arguments([layer])}
    ops.linear(**arguments)
    with pytest.raises(RuntimeError, match=message):
        ops.linear(**{**arguments, **change})


def test_refuses_an_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("EXL3_CPU_ISA", "sse2")
    layer = make_layer(np.random.default_rng(12), 128, 128, 64, 1)
    with pytest.raises(ValueError, match="EXL3_CPU_ISA is 'sse2'; it can be portable"):
        ops.linear(torch.zeros(1, 128), bias=None, **linear_arguments([layer]))


def test_compiles_whole_with_any_number_of_rows():
    rng = np.random.default_rng(4)
    layers = [make_layer(rng, 256, 128, 64, 1), make_layer(rng, 256, 256, 48, 2)]
    arguments = linear_arguments(layers, [(0, 128), (0, 200)])

    def twice(x):
        return ops.linear(x, bias=None, **arguments) * 2

    compiled = torch.compile(twice, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 3, 11):
        x = draw(rng, rows, 256, torch.bfloat16)
        assert torch.equal(compiled(x), twice(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    layer = make_layer(np.random.default_rng(5), 128, 128, 64, 1)
    arguments = linear_arguments([layer])
    x = torch.zeros(2, 128, dtype=dtype)
    library.opcheck(torch.ops.exl3.linear, (x,), {**arguments, "bias": None})
