# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What `exl3 quantize` writes is served, and computes what its weights say.

The reference is Hugging Face's model in float32, with the weights that a decoder makes
of the pack.
"""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from exl3 import cli
from exl3.codec import scale
from exl3.model.dense import read_dense
from tests.checkpoints import save_checkpoint, write_checkpoint
from tests.serving.generate import MTP, Case, run
from tests.serving.oracle import compare, load_reference

#: As in test_exl3_logprobs.
TOLERANCE = 0.01
#: By name: fields of the source, and options.
PACKS = {
    "sliced": (
        {"model_type": "deepseek_v3"},
        ("--rank-sliced", "--tp", "2", "--attn-bits", "5", "--head-bits", "6"),
    ),
    # Sizes that are no multiples of 128, biases, and a head of the embeddings.
    "plain": (
        {
            "model_type": "glm4_moe",
            "moe_intermediate_size": 160,
            "intermediate_size": 200,
        },
        ("--mtp-bits", "16", "--codebook", "mcg"),
    ),
}


def write_twin(source, pack, out):
    """The source with the pack's weights, decoded."""
    sizes = {}
    for file in source.glob("*.safetensors"):
        sizes |= {name: at.shape for name, at in load_file(file).items()}
    tensors = {
        name: tensor[tuple(map(slice, sizes[name]))].float().contiguous()
        for name, tensor in read_dense(pack).items()
    }
    assert tensors.keys() == sizes.keys()
    config = json.loads((source / "config.json").read_text())
    return save_checkpoint(out, {**config, "dtype": "float32"}, tensors)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    draw = random.Random(0)
    text = folder / "text.txt"
    text.write_text(" ".join(f"w{draw.randrange(3, 512)}" for _ in range(2100)))
    twins, cases = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "_SAMPLE", 8)  # for speed
        for name, (fields, options) in PACKS.items():
            source = write_checkpoint(
                folder / f"{name}-source", layers=2, experts=4, hidden=128, **fields
            )
            out = folder / name
            more = ["--bits", "3.5", "--text", str(text)]
            assert cli.main(["quantize", str(source), str(out), *more, *options]) == 0
            twins[name] = write_twin(source, out, folder / f"{name}-twin")
            cases[name] = Case(str(out), {"speculative_config": MTP}, exact=True)
    return twins, dict(zip(cases, run(*cases.values()), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PACKS)
def test_a_pack_is_served_as_its_weights_say(served, name):
    twins, results = served
    assert results[name].error is None
    reference = load_reference(twins[name])
    assert compare(reference, results[name].completions) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKS)
def test_its_draft_is_often_right(served, name):
    result = served[1][name]
    assert 0 < result.accepted < result.drafted
    assert torch.tensor(result.completions[0].logprobs).isfinite().all()
