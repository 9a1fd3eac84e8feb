# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a text says of a model's linear layers and experts."""

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3.format.errors import TensorError
from exl3.model import StreamedModel
from exl3.tools.quantize import calibrate
from exl3.tools.quantize.hessian import Hessian
from exl3.tools.quantize.text import Text, measure_sensitivities
from exl3.tools.quantize.workers import StoppedError, Workers
from exl3.tools.shared.progress import progress_bar
from exl3.tools.shared.staging import StagedCheckpoint
from tests.checkpoints import VOCAB_SIZE, write_checkpoint

HIDDEN = 128
WIDTHS = [0, 3, 2, 4]  # the last is a draft layer
WINDOWS, LENGTH = 5, 24
ATTENTION = "model.layers.1.self_attn"
SHARED = "model.layers.1.mlp.shared_experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(
        tmp_path_factory.mktemp("source"),
        model_type="glm_moe_dsa",
        layers=3,
        widths=WIDTHS,
        hidden=HIDDEN,
    )


@pytest.fixture
def text(folder):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB_SIZE, (WINDOWS, LENGTH), generator=generator)
    found = Text(StreamedModel.open(folder), tokens)
    found.start()
    return found


@pytest.fixture
def workers():
    with Workers(2) as found:
        yield found


@pytest.fixture(autouse=True)
def small_waves(monkeypatch):
    """Five windows are three waves."""
    monkeypatch.setattr(calibrate, "WAVE", 2)


def layer_of(text, workers, index):
    """A layer, with the text in front of it."""
    for layer in text.layers(0):
        if layer.index == index:
            return layer
        text.run(layer, workers)
    raise AssertionError(index)


def squared(difference):
    return difference.square().sum()


def test_moments_are_those_of_the_inputs(text, workers):
    layer = layer_of(text, workers, 1)
    hidden = torch.cat(text.hidden)
    names = [f"{ATTENTION}.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    names += [f"{SHARED}.{name}_proj" for name in ("gate", "up", "down")]
    found = text.run(layer, workers, linears=set(names)).hessians
    assert found.keys() == set(names)
    # Layers that read the same share the moments of it.
    assert len({id(found[name]) for name in names}) == 3
    assert found[names[0]] is found[names[1]]
    assert found[names[2]] is found[names[3]]
    x = layer.module.input_layernorm(hidden).flatten(0, 1)
    assert found[names[0]].rows == WINDOWS * LENGTH
    torch.testing.assert_close(found[names[0]].total, x.T @ x, rtol=1e-4, atol=1e-4)


def test_only_what_is_watched_is_kept(text, workers):
    found = text.run(layer_of(text, workers, 1), workers)
    assert (found.hessians, found.experts) == ({}, None)


def test_text_goes_through_the_layer(text, workers):
    layer = layer_of(text, workers, 1)
    before = torch.cat(text.hidden)
    text.run(layer, workers, keep_experts=True)
    torch.testing.assert_close(torch.cat(text.hidden), layer(before))


def test_moments_of_an_expert_weigh_its_errors(text, workers):
    """`tr(E @ H @ E.T)` is what an error E of a weight adds to the stream, squared."""
    layer = layer_of(text, workers, 1)
    hidden = torch.cat(text.hidden)
    inputs = text.run(layer, workers, keep_experts=True).experts
    before = layer(hidden)
    for expert in range(len(layer.moe)):
        weights = layer.moe.gate_proj[expert], layer.moe.up_proj[expert]
        inner = inputs.moments(expert, *weights)[1]
        rows = sum(len(tokens) for _, tokens, _ in inputs.rows[expert])
        down = layer.moe.down_proj[expert]
        error = torch.randn(down.shape) * 0.01
        kept = down.data
        down.data = kept.float() + error
        added = squared(layer(hidden) - before)
        down.data = kept
        expected = torch.trace(error @ inner @ error.T) * rows
        torch.testing.assert_close(added, expected, rtol=2e-2, atol=0)


def test_moments_of_what_an_expert_reads(text, workers):
    layer = layer_of(text, workers, 1)
    hidden = torch.cat(text.hidden)
    seen = []
    hook = layer.moe.register_forward_pre_hook(lambda _, given: seen.append(given))
    layer(hidden)
    hook.remove()
    tokens, chosen, weights = seen[0]
    inputs = text.run(layer, workers, keep_experts=True).experts
    of_expert = torch.where(chosen == 2, weights, 0).sum(-1)
    x = tokens * of_expert.unsqueeze(-1)
    rows = (chosen == 2).any(-1).sum()
    outer, _ = inputs.moments(2, layer.moe.gate_proj[2], layer.moe.up_proj[2])
    torch.testing.assert_close(outer, x.T @ x / rows, rtol=1e-3, atol=1e-5)


def test_an_expert_without_tokens_has_no_moments(text, workers):
    layer = layer_of(text, workers, 1)
    inputs = text.run(layer, workers, keep_experts=True).experts
    del inputs.rows[0]
    weights = layer.moe.gate_proj[0], layer.moe.up_proj[0]
    assert inputs.moments(0, *weights) == (None, None)


def test_sensitivity_is_an_experts_share_of_the_stream(text, workers):
    """Found by leaving the expert out."""
    layer = layer_of(text, workers, 2)
    hidden = torch.cat(text.hidden)
    found = text.run(layer, workers).sensitivities
    before = layer(hidden)
    assert len(found) == WIDTHS[2]
    for expert, share in enumerate(found):
        down = layer.moe.down_proj[expert]
        kept = down.data
        down.data = torch.zeros_like(kept)
        added = (before - layer(hidden)).square().sum(-1)
        down.data = kept
        expected = (added / before.square().sum(-1)).sum()
        torch.testing.assert_close(torch.tensor(share), expected, rtol=1e-3, atol=0)


def test_draft_layers_read_the_next_token(text, workers):
    draft = layer_of(text, workers, 3)
    trunk = torch.cat(text.hidden)
    found = text.run(draft, workers, keep_experts=True)
    expected = draft(trunk[:, :-1], text.tokens[:, 1:])
    torch.testing.assert_close(torch.cat(text.drafts[3]), expected)
    assert len(found.sensitivities) == WIDTHS[3]
    assert torch.equal(torch.cat(text.hidden), trunk)


def test_the_head_serves_trunk_and_drafts(text, workers):
    draft = layer_of(text, workers, 3)
    text.run(draft, workers)
    found = text.head_hessian(workers)
    normed = [text.model.head.norm(torch.cat(text.hidden))]
    normed.append(draft.head.norm(torch.cat(text.drafts[3])))
    x = torch.cat([of.flatten(0, 1) for of in normed])
    assert found.rows == WINDOWS * (2 * LENGTH - 1)
    torch.testing.assert_close(found.total, x.T @ x, rtol=1e-4, atol=1e-3)


def test_the_number_of_threads_changes_no_bit(text):
    states, moments = [], []
    for threads in (1, 3):
        text.start()
        with Workers(threads) as workers:
            layer = layer_of(text, workers, 1)
            name = f"{ATTENTION}.q_a_proj"
            found = text.run(layer, workers, linears={name}, keep_experts=True)
            states.append(torch.cat(text.hidden))
            weights = layer.moe.gate_proj[0], layer.moe.up_proj[0]
            moments.append([found.hessians[name].total])
            moments[-1] += found.experts.moments(0, *weights)
    assert torch.equal(*states)
    assert all(torch.equal(*both) for both in zip(*moments))


def test_a_state_is_taken_up_where_it_was_left(text, workers):
    text.run(layer_of(text, workers, 3), workers)
    other = Text(text.model, text.tokens)
    other.restore(text.state())
    assert torch.equal(torch.cat(other.hidden), torch.cat(text.hidden))
    assert torch.equal(torch.cat(other.drafts[3]), torch.cat(text.drafts[3]))


def test_sensitivities_go_on_where_they_were_stopped(text, workers, tmp_path):
    def measure(name, resume=False, layers=None):
        place = tmp_path / name
        with (
            StagedCheckpoint(place, {}, resume) as out,
            progress_bar(3, "l", "") as bar,
        ):
            if layers is not None:
                bar.update = lambda: next(steps)
                steps = iter(range(layers))
            return measure_sensitivities(text, out, workers, bar)

    expected = measure("whole")
    assert {layer: len(of) for layer, of in expected.items()} == {0: 0, 1: 3, 2: 2}
    for layers in range(3):
        with pytest.raises(StopIteration):
            measure(f"stopped-{layers}", layers=layers)
        assert measure(f"stopped-{layers}", resume=True) == expected


def test_a_weight_that_is_no_number_is_named(folder, tmp_path, workers):
    broken = tmp_path / "broken"
    write_checkpoint(
        broken, model_type="glm_moe_dsa", layers=3, widths=WIDTHS, hidden=HIDDEN
    )
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[f"{ATTENTION}.o_proj.weight"][3, 5] = torch.inf
    save_file(tensors, file)
    text = Text(StreamedModel.open(broken), torch.zeros(2, 8, dtype=torch.long))
    text.start()
    with pytest.raises(TensorError, match=r"^model.layers.1.self_attn.o_proj.weight: "):
        layer_of(text, workers, 2)


def test_rows_that_are_no_numbers_are_left_out():
    hessian = Hessian(2)
    assert hessian.mean() is None
    x = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [3.0, float("inf")]])
    hessian.add(x, torch.tensor([2.0, 1.0, 1.0]))
    assert torch.equal(hessian.mean(), torch.tensor([[4.0, 8.0], [8.0, 16.0]]))


# --- Threads ------------------------------------------------------------------------


def test_leads_come_in_order_and_are_taken_as_needed():
    taken = []

    def items():
        for item in range(9):
            taken.append(item)
            yield item

    with Workers(2) as workers:

        def work(item):
            assert torch.get_num_threads() == 1
            return workers.map(lambda part: item * 10 + part, range(3))

        results = workers.lead(work, items(), at_once=2)
        assert next(results) == [0, 1, 2]
        assert len(taken) <= 3
        assert list(results) == [[10 * k, 10 * k + 1, 10 * k + 2] for k in range(1, 9)]


def test_a_task_that_fails_ends_the_others():
    threads = torch.get_num_threads()
    ended = []
    begun = threading.Event()

    def work(item):
        if item == 0:
            begun.wait()
            raise RuntimeError("failed")
        begun.set()
        try:
            while True:
                workers.check()
        except StoppedError:
            ended.append(item)

    with pytest.raises(RuntimeError, match="failed"), Workers(1) as workers:
        list(workers.lead(work, range(2), at_once=2))
    assert ended == [1]
    assert torch.get_num_threads() == threads
