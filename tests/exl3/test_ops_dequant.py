# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The dequant and hadamard ops against the independent decoder."""

import numpy as np
import pytest
import torch
from torch import library

from exl3 import ops
from tests import reference_codec
from tests.exl3_layers import DTYPES, RATES, make_layer, relative_error


@pytest.mark.parametrize("words, codebook", RATES)
def test_inner_values_bit_for_bit(words, codebook):
    layer = make_layer(np.random.default_rng(words), 128, 256, words, codebook)
    got = ops.dequant(layer.slab(), None, None, 128, 256, words, codebook)
    assert np.array_equal(got.numpy(), layer.inner().astype(np.float32))


@pytest.mark.parametrize("codebook", [0, 1, 2])
def test_weight(codebook):
    layer = make_layer(np.random.default_rng(codebook), 384, 256, 80, codebook)
    suh, svh = torch.from_numpy(layer.suh), torch.from_numpy(layer.svh)
    got = ops.dequant(layer.slab(), suh, svh, 384, 256, 80, codebook)
    # Fourteen float32 additions and three products to each weight.
    assert relative_error(got, layer.weight()) < 3e-7


def test_one_side_alone():
    layer = make_layer(np.random.default_rng(9), 128, 128, 64, 1)
    suh, svh = torch.from_numpy(layer.suh), torch.from_numpy(layer.svh)
    inner = layer.inner().astype(np.float64)
    left = suh.double().numpy()[:, None] * reference_codec.rotate(inner.T.copy()).T
    right = reference_codec.rotate(inner) * svh.double().numpy()
    slab = layer.slab()
    assert relative_error(ops.dequant(slab, suh, None, 128, 128, 64, 1), left) < 3e-7
    assert relative_error(ops.dequant(slab, None, svh, 128, 128, 64, 1), right) < 3e-7


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": 100}, "k is 100"),
        ({"n": 256}, "the slab has 8192"),
        ({"words": 48}, "trellis has 8192 words"),
        ({"codebook": -1}, "codebook -1"),
        ({"suh": torch.zeros(128)}, "suh is Float"),
        ({"svh": torch.zeros(64).half()}, r"svh has shape \[64\]"),
        ({"trellis": torch.zeros(8192, dtype=torch.int32)}, "trellis is Int"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    layer = make_layer(np.random.default_rng(3), 128, 128, 128, 1)
    arguments = {
        "trellis": layer.slab(),
        "suh": None,
        "svh": None,
        "k": 128,
        "n": 128,
        "words": 128,
        "codebook": 1,
    }
    ops.dequant(**arguments)
    with pytest.raises(RuntimeError, match=message):
        ops.dequant(**{**arguments, **change})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pre, post", [(False, False), (True, False), (True, True)])
def test_hadamard(dtype, pre, post):
    rng = np.random.default_rng(7)
    x = torch.from_numpy(rng.standard_normal((3, 5, 384))).to(dtype)
    before, after = torch.from_numpy(rng.standard_normal((2, 384))).half()
    wanted = x.double().numpy()
    if pre:
        wanted = wanted * before.double().numpy()
    wanted = reference_codec.rotate(wanted)
    if post:
        wanted = wanted * after.double().numpy()
    got = ops.hadamard(x, before if pre else None, after if post else None)
    assert got.dtype == dtype and got.shape == x.shape
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 12**0.5
    assert relative_error(got, wanted) < rounding + 3e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_are_torchs(dtype):
    """Of every value that there is: infinities, NaN and denormals too."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = torch.zeros(2**16, 128, dtype=dtype)
    x[:, 0] = values
    # With zeros beside it, a value meets one product and no sum that rounds.
    wanted = (values.float() * torch.tensor(128**-0.5)).to(dtype)
    got = ops.hadamard(x)[:, 0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_hadamard_refuses_other_widths():
    with pytest.raises(RuntimeError, match="last dimension is 200"):
        ops.hadamard(torch.zeros(1, 200))


def test_opcheck():
    layer = make_layer(np.random.default_rng(5), 128, 128, 64, 1)
    suh, svh = torch.from_numpy(layer.suh), torch.from_numpy(layer.svh)
    arguments = (layer.slab(), suh, svh, 128, 128, 64, 1)
    library.opcheck(torch.ops.exl3.dequant, arguments)
    library.opcheck(torch.ops.exl3.hadamard, (torch.zeros(2, 128), suh, None))
