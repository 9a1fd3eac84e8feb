# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The committed demo checkpoints say what they hold."""

import json
import re
import struct
from pathlib import Path

import pytest

from tools.demo_model.export import WEIGHTS_FILE, WIDTHS_FIELD

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("demo-glm-dsa", "demo-glm-dsa-ragged")
MAX_BYTES = 60_000_000


def header(folder: Path) -> dict:
    """The safetensors header of a checkpoint."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(size))
    tensors.pop("__metadata__", None)
    return tensors


def stored_widths(folder: Path, layers: int) -> list[int]:
    """Rows of each layer's router, 0 where there is none."""
    tensors = header(folder)
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(layers)]
    return [tensors[name]["shape"][0] if name in tensors else 0 for name in names]


def test_both_checkpoints_fit_the_size_limit():
    sizes = [(EXAMPLES / name / WEIGHTS_FILE).stat().st_size for name in NAMES]
    assert sum(sizes) < MAX_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_widths_of_the_config_are_those_of_the_routers(name):
    config = json.loads((EXAMPLES / name / "config.json").read_text())
    layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    moe_layers = layers - config["first_k_dense_replace"]
    equal = [0] * config["first_k_dense_replace"]
    equal += [config["n_routed_experts"]] * moe_layers
    stored = stored_widths(EXAMPLES / name, layers)
    assert stored == config.get(WIDTHS_FIELD, equal)
    assert max(stored) == config["n_routed_experts"]
    assert (WIDTHS_FIELD in config) == (name == "demo-glm-dsa-ragged")


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_numbered_up_to_the_width(name):
    tensors = header(EXAMPLES / name)
    for layer, width in enumerate(stored_widths(EXAMPLES / name, 7)):
        prefix = f"model.layers.{layer}.mlp.experts."
        numbers = {
            int(tensor.removeprefix(prefix).split(".")[0])
            for tensor in tensors
            if tensor.startswith(prefix)
        }
        assert numbers == set(range(width))


@pytest.mark.parametrize("name", NAMES)
def test_projections_are_multiples_of_128(name):
    """So that EXL3 can store them; the 576 of the MLA latent is 512 + 64."""
    sizes = {
        size
        for tensor, entry in header(EXAMPLES / name).items()
        if re.search(r"_proj(_with_mqa)?\.weight$", tensor) and "indexer" not in tensor
        for size in entry["shape"]
    }
    assert {size for size in sizes if size % 128} == {576}


@pytest.mark.parametrize("name", NAMES)
def test_card_states_source_licence_and_measures(name):
    text = (EXAMPLES / name / "README.md").read_text()
    for part in ("bible-kjv-text", "public domain", "Apache-2.0"):
        assert part in " ".join(text.split())
    measured = dict(re.findall(r"^\| ([^|]+) \| ([\d.]+)%?[^|]* \|$", text, re.M))
    assert 0 < float(measured["bits per byte"]) < 2
    shares = [float(v) for k, v in measured.items() if "draft" in k]
    assert len(shares) == 2 and all(50 < share < 100 for share in shares)
