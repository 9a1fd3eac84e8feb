# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A quantized linear layer stands for its weight, and calibration makes it better."""

import pytest
import torch

from exl3.codec import decode_weight, inner_matrix, quantize_linear
from exl3.codec.regularize import INNER_RMS, regularize
from exl3.codec.scale import gaussian_scale, search_scale
from exl3.format.constants import Codebook

#: Relative squared error of Gaussian weights, as tests/exl3/test_codec_viterbi.py.
NMSE = {2: 0.069, 3: 0.0172, 4: 0.0044}


def gaussian(k: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(k, n, generator=torch.Generator().manual_seed(seed)) * 0.02


def correlated_hessian(k: int, rows: int = 512) -> torch.Tensor:
    """Second moments of inputs that a few directions dominate, as activations' do."""
    generator = torch.Generator().manual_seed(k)
    mixing = torch.randn(k, k, generator=generator) / k**0.5
    x = torch.randn(rows, k, generator=generator) * torch.logspace(0, -1.5, k)
    x = x @ mixing
    return x.T @ x / rows


def decoded(layer) -> torch.Tensor:
    return decode_weight(layer.trellis, layer.suh, layer.svh, layer.codebook)


def relative(error: torch.Tensor, weight: torch.Tensor) -> float:
    return (error.square().sum() / weight.square().sum()).item()


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_error_without_calibration(bits, codebook):
    weight = gaussian(128, 256)
    layer = quantize_linear(weight, bits, codebook)
    assert layer.trellis.dtype == torch.int16
    assert layer.trellis.shape == (8, 16, 16 * bits)
    assert layer.suh.dtype == layer.svh.dtype == torch.float16
    assert (layer.bits, layer.calibrated, layer.output_error) == (bits, False, None)
    error = relative(decoded(layer) - weight, weight)
    assert layer.weight_error == pytest.approx(error, rel=1e-4)
    # 128 tiles know the mean to 1%; fp16 scales add less than 1e-6.
    assert error == pytest.approx(NMSE[bits], rel=0.05)


def test_half_rate():
    layer = quantize_linear(gaussian(128, 128), 2.5, Codebook.MUL1)
    assert layer.trellis.shape == (8, 8, 40) and layer.bits == 2.5
    assert NMSE[3] < layer.weight_error < NMSE[2]


@pytest.mark.parametrize("codebook", list(Codebook))
def test_stored_tensors(codebook):
    layer = quantize_linear(gaussian(128, 128), 4, codebook)
    tensors = layer.tensors()
    marker = {
        Codebook.INST3: {},
        Codebook.MCG: {"mcg": -877912083},
        Codebook.MUL1: {"mul1": -2082680531},
    }[codebook]
    assert tensors.keys() == {"trellis", "suh", "svh", *marker}
    for name, value in marker.items():
        assert tensors[name].dtype == torch.int32 and tensors[name].shape == ()
        assert tensors[name].item() == value


@pytest.mark.parametrize("bits", [2, 3])
def test_calibration_lowers_the_error_of_the_outputs(bits):
    weight, hessian = gaussian(256, 128), correlated_hessian(256)
    plain = quantize_linear(weight, bits, Codebook.MCG)
    calibrated = quantize_linear(weight, bits, Codebook.MCG, hessian)

    def output_error(layer):
        error = decoded(layer) - weight
        return (
            (hessian @ error * error).sum() / (hessian @ weight * weight).sum()
        ).item()

    assert calibrated.calibrated
    assert calibrated.output_error == pytest.approx(output_error(calibrated), rel=1e-3)
    # Less than half here; inputs of real layers, with a longer tail, gain as much.
    assert output_error(calibrated) < 0.5 * output_error(plain)
    # And costs error of the weights, which is what the feedback pays with.
    assert calibrated.weight_error > plain.weight_error


def test_feedback_of_uncorrelated_inputs_changes_nothing():
    # With a diagonal Hessian before the rotation that is the same everywhere, L is the
    # identity: every block is encoded as without calibration.
    weight = gaussian(256, 128)
    plain = regularize(weight, 0)
    hessian = torch.diag(1 / plain.su.square())
    layer = quantize_linear(weight, 4, Codebook.MCG, hessian)
    assert layer.calibrated
    expected = quantize_linear(weight, 4, Codebook.MCG)
    assert torch.equal(layer.trellis, expected.trellis)


def test_sizes_are_filled_up_with_zeros():
    weight, hessian = gaussian(200, 130), correlated_hessian(200)
    for moments in (None, hessian):
        layer = quantize_linear(weight, 3, Codebook.MCG, moments)
        assert layer.trellis.shape == (16, 16, 48)
        whole = decoded(layer)
        assert not whole[200:].any() and not whole[:, 130:].any()
        assert not layer.suh[200:].any() and not layer.svh[130:].any()
        error = relative(whole[:200, :130] - weight, weight)
        assert layer.weight_error == pytest.approx(error, rel=1e-4)
    plain = quantize_linear(weight, 3, Codebook.MCG)
    # The padding is no worse coded than the rest, and takes part of the error with it.
    assert plain.weight_error < 1.05 * NMSE[3]


def test_rows_and_columns_of_zeros_stay_zero():
    weight = gaussian(256, 256)
    weight[5] = weight[200:] = 0
    weight[:, 7] = weight[:, :128] = 0
    layer = quantize_linear(weight, 3, Codebook.MUL1, correlated_hessian(256))
    assert torch.equal(decoded(layer) == 0, weight == 0)


def test_a_matrix_of_zeros():
    layer = quantize_linear(torch.zeros(128, 128), 3, Codebook.MCG)
    assert not decoded(layer).any()
    assert layer.weight_error == 0


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 1e5])
def test_size_of_the_weights_does_not_matter(size):
    weight = gaussian(128, 128)
    expected = quantize_linear(weight, 4, Codebook.MCG).weight_error
    layer = quantize_linear(weight * (size / 0.02), 4, Codebook.MCG)
    assert layer.weight_error == pytest.approx(expected, rel=1e-3)


def test_uneven_rows_and_columns():
    # Scales of the rows and columns take out what differs between them.
    weight = gaussian(256, 256) * torch.logspace(0, 2, 256)
    weight = weight * torch.logspace(2, 0, 256).unsqueeze(1)
    layer = quantize_linear(weight, 3, Codebook.MCG)
    error = (decoded(layer) - weight).square().mean(0) / weight.square().mean(0)
    assert error.mean().item() < 1.05 * NMSE[3]


def test_every_block_reaches_the_trellis_with_the_same_size():
    weight = gaussian(256, 256) * 7
    weight[40:128] = 0
    weight[:, 200:] = 0
    parts = regularize(weight, seed=1)
    blocks = parts.inner.unflatten(0, (2, 128)).unflatten(2, (2, 128))
    rms = blocks.square().mean((1, 3)).sqrt()
    assert torch.allclose(rms, torch.full((2, 2), INNER_RMS), rtol=0.01)


@pytest.mark.parametrize(
    "hessian",
    [
        torch.zeros(128, 128),
        torch.full((128, 128), torch.nan),
        torch.full((128, 128), torch.inf),
    ],
)
def test_moments_that_say_nothing_are_left_out(hessian):
    weight = gaussian(128, 128)
    layer = quantize_linear(weight, 4, Codebook.MCG, hessian)
    assert not layer.calibrated and layer.output_error is None
    plain = quantize_linear(weight, 4, Codebook.MCG)
    assert torch.equal(layer.trellis, plain.trellis)


@pytest.mark.parametrize("rank", [1, 3])
def test_moments_of_few_rows(rank):
    x = gaussian(rank, 256, seed=9)
    layer = quantize_linear(gaussian(256, 128), 3, Codebook.MCG, x.T @ x)
    assert layer.calibrated
    assert 0 < layer.output_error < layer.weight_error


def test_scale_of_gaussian_tiles_is_found():
    inner = gaussian(256, 256) / 0.02 * INNER_RMS
    for codebook in Codebook:
        found = search_scale(inner, 64, codebook)
        assert found == pytest.approx(gaussian_scale(64, codebook), abs=0.05)


def test_scale_follows_the_tails():
    # With weights far out, which the codebook cuts off, the best scale is smaller.
    inner = gaussian(256, 256) / 0.02
    inner = inner.sign() * inner.abs() ** 2
    inner *= INNER_RMS / inner.square().mean().sqrt()
    found = search_scale(inner, 64, Codebook.MCG)
    assert found < gaussian_scale(64, Codebook.MCG) - 0.1


def test_seed_decides_the_signs():
    weight = gaussian(128, 128)
    one, same, other = (
        quantize_linear(weight, 4, Codebook.MCG, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(one.trellis, same.trellis) and torch.equal(one.suh, same.suh)
    assert not torch.equal(one.suh.sign(), other.suh.sign())
    assert not torch.equal(one.trellis, other.trellis)


@pytest.mark.parametrize("hessian", [None, torch.eye(256)])
def test_progress(hessian):
    seen = []
    quantize_linear(gaussian(256, 384), 4, Codebook.MCG, hessian, progress=seen.append)
    assert sum(seen) == 256 * 384
    assert len(seen) > 3


@pytest.mark.parametrize("hessian", [None, correlated_hessian(256)])
def test_strips_may_be_encoded_in_any_order(hessian):
    """Columns do not depend on each other once the matrix is regularized."""

    def backwards(encode, strips):
        strips = list(strips)
        assert [strip.shape for strip in strips] == [(256, 128)] * 3
        return [encode(strip) for strip in strips[::-1]][::-1]

    weight = gaussian(256, 384)
    expected = quantize_linear(weight, 3, Codebook.MCG, hessian)
    found = quantize_linear(weight, 3, Codebook.MCG, hessian, run=backwards)
    assert torch.equal(found.trellis, expected.trellis)


def test_bfloat16_weight_counts_as_its_values():
    weight = gaussian(128, 128).bfloat16()
    layer = quantize_linear(weight, 4, Codebook.MCG)
    expected = quantize_linear(weight.float(), 4, Codebook.MCG)
    assert torch.equal(layer.trellis, expected.trellis)


def broken(value: float) -> torch.Tensor:
    weight = gaussian(128, 128)
    weight[5, 7] = value
    return weight


@pytest.mark.parametrize(
    ("weight", "bits", "hessian", "says"),
    [
        (broken(torch.nan), 3, None, r"1 of 16384 .* first is nan at \[5, 7\]"),
        (broken(torch.inf), 3, None, r"1 of 16384 .* first is inf at \[5, 7\]"),
        (gaussian(128, 128), 2.5, None, "mcg has no rate of 2.5 bits"),
        (gaussian(128, 128), 9, None, "no rate of 9 bits"),
        (gaussian(128, 128), 3.01, None, "no rate of 3.01 bits"),
        (gaussian(128, 128), 3, torch.eye(64), r"shape \[64, 64\]; .*\[128, 128\]"),
        (torch.zeros(0, 128), 3, None, r"shape \[0, 128\] is not a matrix"),
        (torch.zeros(128), 3, None, r"shape \[128\] is not a matrix"),
        (torch.zeros(128, 128, dtype=torch.int8), 3, None, "int8 of shape"),
    ],
)
def test_refusals_name_the_weight(weight, bits, hessian, says):
    with pytest.raises(ValueError, match=says) as refusal:
        quantize_linear(weight, bits, Codebook.MCG, hessian, name="model.q_proj")
    assert str(refusal.value).startswith("model.q_proj: ")
    assert "\n" not in str(refusal.value)


def test_inner_matrix_is_on_the_codebooks_scale():
    layer = quantize_linear(gaussian(256, 256), 4, Codebook.MUL1)
    rms = inner_matrix(layer.trellis, Codebook.MUL1).square().mean().sqrt().item()
    assert rms == pytest.approx(INNER_RMS * gaussian_scale(64, Codebook.MUL1), rel=0.05)
