# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A linear layer's tensors, whole and in slices, stand for its weight."""

from dataclasses import replace

import pytest
import torch

from exl3.format.constants import Codebook
from exl3.model.dense import read_dense
from exl3.tools.quantize.encode import Job, encode, padded_bias, slice_job
from exl3.tools.shared.errors import ToolError
from exl3.tools.shared.staging import StagedCheckpoint

# Relative squared error of Gaussian weights at 3 bits: 0.0172, and what the search for
# a scale over few tiles and 16-bit signs and scales add.
MOST_ERROR = 0.0172 * 1.15


def decode(tensors, folder):
    """What a checkpoint of these tensors stands for."""
    with StagedCheckpoint(folder / "out", {}) as writer:
        writer.write_shard("all", tensors)
        writer.write_json("config.json", {})
    return read_dense(folder / "out")


def weight(n, k):
    generator = torch.Generator().manual_seed(n + k)
    return torch.randn(n, k, generator=generator) * 0.02


def relative_error(found, expected):
    return float((found - expected).square().sum() / expected.square().sum())


@pytest.mark.parametrize("codebook", list(Codebook))
def test_odd_sizes_are_filled_up_and_come_back(codebook, tmp_path):
    expected = weight(200, 130)
    tensors = encode(Job("a.q_proj", expected, None, 3, codebook), seed=1).tensors
    assert tensors["a.q_proj.trellis"].shape == (256 // 16, 256 // 16, 48)
    found = decode(tensors, tmp_path)["a.q_proj.weight"]
    assert found.shape == (256, 256)
    assert not found[200:].any()
    # A block of 128 inputs with few of them filled spreads its error over the rest.
    assert relative_error(found[:200, :130], expected) < MOST_ERROR


@pytest.mark.parametrize(
    ("projection", "shape"),
    [("gate_proj", (256, 128)), ("up_proj", (256, 128)), ("down_proj", (128, 256))],
)
def test_slices_are_encoded_by_themselves_and_make_the_whole(projection, shape):
    job = Job("l.experts.0." + projection, weight(*shape), None, 3, Codebook.MCG)
    slices = list(slice_job(job, 2, by_output=projection != "down_proj"))
    assert [each.module for each in slices] == [
        f"l.experts.0.{projection}.rank{rank}" for rank in (0, 1)
    ]
    dim = 1 if projection == "down_proj" else 0
    whole = torch.cat([each.weight for each in slices], dim=dim)
    assert torch.equal(whole, job.weight)
    vectors = [
        encode(each, seed).tensors[f"{each.module}.suh"]
        for seed, each in enumerate(slices)
    ]
    assert not torch.equal(*vectors)


def test_a_slice_of_the_inputs_has_its_block_of_the_moments():
    moments = torch.arange(256.0 * 256).view(256, 256)
    job = Job("l.experts.0.down_proj", weight(128, 256), moments, 3, Codebook.MCG)
    first, second = slice_job(job, 2, by_output=False)
    assert torch.equal(first.hessian, moments[:128, :128])
    assert torch.equal(second.hessian, moments[128:, 128:])
    gate = Job("l.experts.0.gate_proj", weight(256, 256), moments, 3, Codebook.MCG)
    for each in slice_job(gate, 2, by_output=True):
        assert torch.equal(each.hessian, moments)


def test_a_slice_is_whole_blocks():
    job = Job("l.experts.0.up_proj", weight(384, 128), None, 3, Codebook.MCG)
    with pytest.raises(ValueError, match="384 features over 2 ranks are not whole"):
        list(slice_job(job, 2, by_output=True))


def test_an_experts_slices_decode_to_its_weights(tmp_path):
    tensors, expected = {}, {}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.0.{projection}"
        shape = (128, 256) if projection == "down_proj" else (256, 128)
        expected[f"{name}.weight"] = weight(*shape)
        job = Job(name, expected[f"{name}.weight"], None, 3, Codebook.MCG)
        for each in slice_job(job, 2, by_output=projection != "down_proj"):
            tensors |= encode(each).tensors
    found = decode(tensors, tmp_path)
    assert found.keys() == expected.keys()
    for name, dense in expected.items():
        assert relative_error(found[name], dense) < MOST_ERROR


def test_the_name_decides_the_signs():
    """So matrices may be encoded in any order."""
    one, other = (
        encode(Job(name, weight(128, 128), None, 3, Codebook.MCG)).tensors
        for name in ("a.q_proj", "a.k_proj")
    )
    again = encode(Job("a.q_proj", weight(128, 128), None, 3, Codebook.MCG)).tensors
    assert torch.equal(one["a.q_proj.trellis"], again["a.q_proj.trellis"])
    assert not torch.equal(one["a.q_proj.suh"].sign(), other["a.k_proj.suh"].sign())


def test_figures_of_a_matrix():
    job = Job("a.q_proj", weight(200, 130), None, 3, Codebook.MCG)
    coded = encode(job)
    assert (coded.num_weights, coded.bits) == (256 * 256, 3)
    # Blocks that are filled up with zeros have fewer errors.
    assert 0.7 * MOST_ERROR < coded.error < MOST_ERROR
    calibrated = encode(replace(job, hessian=torch.eye(130)))
    assert calibrated.error == pytest.approx(coded.error, rel=0.15)


def test_a_weight_that_is_no_number_is_refused_by_name():
    broken = weight(128, 128)
    broken[3, 5] = torch.nan
    with pytest.raises(ToolError, match=r"^a\.q_proj: 1 of 16384 .* nan at \[5, 3\]"):
        encode(Job("a.q_proj", broken, None, 3, Codebook.MCG))


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
    ],
)
def test_a_failed_allocation_is_refused_by_name(failure):
    def fail(*_):
        raise failure

    job = Job("a.q_proj", weight(128, 256), None, 3, Codebook.MCG)
    with pytest.raises(ToolError, match=r"^a\.q_proj: .*memory .* 128 x 256;"):
        encode(job, run=fail)


def test_other_errors_are_not_taken_for_a_failed_allocation():
    def fail(*_):
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        encode(Job("a", weight(128, 128), None, 3, Codebook.MCG), run=fail)


def test_a_bias_is_stored_as_the_format_has_it():
    stored = padded_bias(torch.ones(130, dtype=torch.bfloat16), "a.q_proj")
    assert stored.dtype == torch.float16 and stored.shape == (256,)
    assert stored[:130].eq(1).all() and not stored[130:].any()
    with pytest.raises(ToolError, match=r"^a\.q_proj\.bias: .*65504"):
        padded_bias(torch.tensor([1e5]), "a.q_proj")
