# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a text says of routed experts, against a count by hand on HF's own model."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from exl3.format.errors import CheckpointError
from exl3.tools.prune import gather
from exl3.tools.prune.gather import gather_statistics
from exl3.tools.prune.layers import read_source
from exl3.tools.prune.statistics import (
    FORMAT,
    LayerStatistics,
    as_json,
    frequency,
    read_statistics,
    reap,
)
from exl3.tools.shared.errors import ToolError
from exl3.tools.shared.staging import StagedCheckpoint
from tests.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.damage import with_tensors
from tests.packs import write_pack
from tests.serving.oracle import load_reference

TOKENS = torch.randint(
    3, VOCAB_SIZE, (3, 40), generator=torch.Generator().manual_seed(7)
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "source"
    return write_checkpoint(folder, dtype="float32", layers=4)


@pytest.fixture(scope="module")
def found(dense):
    return gather_statistics(read_source(dense), TOKENS, None)


@torch.no_grad()
def counted_by_hand(folder, layer, tokens):
    """Runs Hugging Face's whole model, and one layer's experts from the stored weights.

    Top 2 of 8 by sigmoid plus bias, weights normalised and times the model's factor.
    """
    model = load_reference(folder)
    seen = {}
    block = model.model.layers[layer]
    block.mlp.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    block.register_forward_hook(lambda _, __, out: seen.update(stream=out))
    model(tokens)
    x, stream = seen["x"].flatten(0, 1), seen["stream"]
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    mlp = f"model.layers.{layer}.mlp"
    scores = (x @ stored[f"{mlp}.gate.weight"].T).sigmoid()
    bias = stored[f"{mlp}.gate.e_score_correction_bias"]
    chosen = (scores + bias).topk(2).indices
    weights = scores.gather(1, chosen)
    weights = 2.5 * weights / weights.sum(1, keepdim=True)
    counts, added = [0] * 8, [0.0] * 8
    for row, experts in enumerate(chosen.tolist()):
        for slot, expert in enumerate(experts):
            gate, up, down = (
                stored[f"{mlp}.experts.{expert}.{part}_proj.weight"]
                for part in ("gate", "up", "down")
            )
            inner = torch.nn.functional.silu(gate @ x[row]) * (up @ x[row])
            counts[expert] += 1
            added[expert] += (weights[row, slot] * (down @ inner).norm()).item()
    return counts, added, stream.norm(dim=-1).mean().item()


@pytest.mark.parametrize("layer", [1, 3])
def test_counts_and_sums_are_those_by_hand(dense, found, layer):
    counts, added, stream = counted_by_hand(dense, layer, TOKENS)
    assert found[layer].tokens == TOKENS.numel()
    assert list(found[layer].chosen) == counts
    # Sums over experts come in another order, in float32.
    assert found[layer].added == pytest.approx(added, rel=1e-3)
    assert found[layer].stream == pytest.approx(stream, rel=1e-4)


def test_every_layer_with_experts_is_there(found):
    assert list(found) == [1, 2, 3, 4]
    for layer in found.values():
        assert sum(layer.chosen) == 2 * layer.tokens
    assert found[4].tokens == 3 * 39  # the draft has no token after the last


def test_saliencies():
    layer = LayerStatistics(10, (4, 0, 2), (8.0, 0.0, 7.0), 2.0)
    assert reap(layer) == [1.0, 0.0, 1.75]
    assert frequency(layer) == [0.4, 0.0, 0.2]


def test_a_pack_is_decoded(tmp_path):
    pack = write_pack(tmp_path / "pack", ranks=2)
    by_pack = gather_statistics(read_source(pack.path), TOKENS, None)
    by_twin = gather_statistics(read_source(pack.twin), TOKENS, None)
    for layer, of in by_pack.items():
        assert of.chosen == by_twin[layer].chosen
        assert of.added == pytest.approx(by_twin[layer].added, rel=1e-3)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("stop", [0, 1, 3, 4])
def test_a_stopped_run_goes_on_with_the_next_layer(
    dense, found, tmp_path, monkeypatch, stop
):
    source, measure, ran = read_source(dense), gather._measure, []

    def stopping(layer, *states):
        if layer.index == stop and len(ran) == stop:
            ran.append("stopped")
            raise Stopped
        ran.append(layer.index)
        return measure(layer, *states)

    monkeypatch.setattr(gather, "_measure", stopping)
    out = tmp_path / "out"
    with pytest.raises(Stopped), StagedCheckpoint(out, {}) as staged:
        gather_statistics(source, TOKENS, staged)
    with StagedCheckpoint(out, {}, resume=stop > 0) as staged:
        assert gather_statistics(source, TOKENS, staged) == found
        assert gather_statistics(source, TOKENS, staged) == found
        staged.write_json("config.json", {})
    assert ran == [*range(stop), "stopped", *range(stop, 5)]


def test_weights_that_are_not_finite_are_refused(dense, tmp_path):
    def damage(tensors):
        tensors["model.layers.2.mlp.shared_experts.up_proj.weight"][3, 5] = math.inf

    source = with_tensors(dense, tmp_path / "bad", damage)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2: gives infinities"):
        gather_statistics(read_source(source), TOKENS, None)


def test_a_file_of_statistics_says_the_same(dense, found, tmp_path):
    file = tmp_path / "statistics.json"
    file.write_text(json.dumps(as_json(found)))
    layers = list(read_source(dense).layers.values())
    assert read_statistics(file, layers) == found


GOOD = {"tokens": 9, "chosen": [1] * 8, "added": [0.5] * 8, "stream": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"tokens": "many"},
        {"chosen": [1] * 7},
        {"chosen": [1.5] * 8},
        {"chosen": None},
        {"added": [0.5] * 7 + [math.nan]},
        {"added": [0.5] * 7 + [-1]},
        {"added": {"0": 1}},
        {"stream": 0.0},
        {"stream": math.inf},
        {"stream": [1.0]},
    ],
)
def test_hostile_statistics(dense, tmp_path, change):
    layers = list(read_source(dense).layers.values())
    by_layer = {str(layer.index): GOOD for layer in layers}
    file = tmp_path / "statistics.json"
    file.write_text(json.dumps({"format": FORMAT, "layers": by_layer}))
    assert read_statistics(file, layers)[2].tokens == 9
    by_layer["2"] = GOOD | change
    file.write_text(json.dumps({"format": FORMAT, "layers": by_layer}))
    with pytest.raises(ToolError, match=r"statistics.json: layer 2 has .*; gather"):
        read_statistics(file, layers)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is no file of router statistics"),
        ({"layers": {}}, "is no file of router statistics"),
        ({"format": FORMAT}, "layers is None"),
        ({"format": FORMAT, "layers": {"1": GOOD}}, "layer 2 has {}"),
    ],
)
def test_files_that_hold_none(dense, tmp_path, content, message):
    file = tmp_path / "statistics.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ToolError, match=message):
        read_statistics(file, list(read_source(dense).layers.values()))
