# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Calibration sees every layer's inputs, and every expert's own."""

import json

import pytest
import torch

from exl3.tools.quantize.hessian import Hessian
from tools.demo_model import export
from tools.demo_model.calibrate import BATCH, SEED, WINDOW, calibrate
from tools.demo_model.load import load_checkpoint, model_config

WIDTHS = [0, 6, 3, 4]


class Windows:
    """Random tokens in place of the text."""

    def windows(self, seed, step, batch, length):
        assert (seed, batch) == (SEED, BATCH)
        generator = torch.Generator().manual_seed(step)
        return torch.randint(2, 320, (2, 40), generator=generator)


@pytest.fixture
def calibration(ragged_model):
    return calibrate(ragged_model, Windows(), steps=2)


def test_every_matrix_is_seen_under_its_stored_name(
    ragged_model, calibration, tokenizer, tmp_path
):
    stored = {
        name.removesuffix(".weight"): tensor.shape[1]
        for name, tensor in export.hf_tensors(ragged_model).items()
        if name.endswith("_proj.weight") or "with_mqa" in name or "lm_head" in name
    }
    indexers = {name for name in stored if ".indexer." in name}
    sizes = {name: len(h.total) for name, h in calibration.hessians.items()}
    assert sizes == {name: stored[name] for name in stored.keys() - indexers}
    assert all(hessian.rows for hessian in calibration.hessians.values())
    assert calibration.num_tokens == 2 * BATCH * WINDOW


@torch.no_grad()
def test_moments_are_those_of_the_inputs(ragged_model, calibration):
    """The first layer's query projection reads the normed embeddings."""
    layer = ragged_model.layers[0]
    total = torch.zeros(64, 64)
    for step in range(2):
        tokens = Windows().windows(SEED, step, BATCH, WINDOW)[:, :-2]
        x = layer.input_layernorm(ragged_model.embed_tokens(tokens), torch.float32)
        total += torch.einsum("bti,btj->ij", x, x)
    hessian = calibration.hessians["model.layers.0.self_attn.q_a_proj"]
    assert hessian.rows == 2 * 2 * 38
    torch.testing.assert_close(hessian.total, total, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_expert_is_weighed_by_its_router(ragged_model):
    """By finite differences: `tr(E.T @ H @ E)` is what an error E adds, squared."""
    moe = ragged_model.layers[2].mlp
    seen = []
    hook = moe.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    calibration = calibrate(ragged_model, Windows(), steps=1)
    hook.remove()
    before = moe(seen[0])
    error = torch.randn(64, 32) * 0.01
    moe.down[1] += error
    added = (moe(seen[0]) - before).square().sum()
    moments = calibration.hessians["model.layers.2.mlp.experts.1.down_proj"].total
    expected = torch.trace(error @ moments @ error.T)
    torch.testing.assert_close(added, expected, rtol=1e-3, atol=0)


@torch.no_grad()
def test_sensitivity_is_an_experts_share_of_the_stream(ragged_model, calibration):
    counted = {}
    for layer, expert in calibration.sensitivities:
        counted.setdefault(layer, []).append(expert)
    assert counted == {
        layer: list(range(width)) for layer, width in enumerate(WIDTHS) if width
    }
    # Doubling an expert's output makes it four times as large beside the same stream;
    # the stream grows too, so it is less than four.
    before = calibration.sensitivities[2, 1]
    ragged_model.layers[2].mlp.down[1] *= 2
    after = calibrate(ragged_model, Windows(), steps=2).sensitivities[2, 1]
    assert 2 * before < after < 4 * before


def test_rows_that_are_no_numbers_are_left_out():
    hessian = Hessian(2)
    assert hessian.mean() is None
    x = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [3.0, float("inf")]])
    hessian.add(x, torch.tensor([2.0, 1.0, 1.0]))
    assert torch.equal(hessian.mean(), torch.tensor([[4.0, 8.0], [8.0, 16.0]]))


@pytest.mark.parametrize("which", ["equal_model", "ragged_model"])
def test_an_exported_checkpoint_comes_back(which, request, tokenizer, tmp_path):
    model = request.getfixturevalue(which)
    export.write(model, tokenizer, tmp_path)
    assert model_config(json.loads((tmp_path / "config.json").read_text())) == (
        model.config
    )
    loaded = load_checkpoint(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        keeps = name.endswith("e_score_correction_bias")
        expected = value if keeps else value.bfloat16().float()
        assert torch.equal(loaded[name], expected), name
