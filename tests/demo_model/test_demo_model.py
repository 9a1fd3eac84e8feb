# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The trained module is the model that transformers loads from its export."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from tools.demo_model import export
from tools.demo_model.card import round_to_stored
from tools.demo_model.evaluate import complete, heldout_sums, summary
from tools.demo_model.layers import dropout
from tools.demo_model.moe import SLOT_BLOCK
from tools.demo_model.train import RECIPES

# float32 on both sides, sums of at most a few hundred products of order one.
TOLERANCE = 1e-4


@pytest.fixture
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, 320, (2, 77), generator=generator)


def reference(folder, **changes) -> GlmMoeDsaForCausalLM:
    fields = json.loads((folder / "config.json").read_text())
    config = GlmMoeDsaConfig(**(fields | changes))
    model, info = GlmMoeDsaForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    return model.eval()


@torch.no_grad()
def test_logits_are_those_of_transformers(equal_model, tokenizer, tokens, tmp_path):
    export.write(equal_model, tokenizer, tmp_path)
    round_to_stored(equal_model)
    ours = equal_model.logits(equal_model.trunk(tokens))
    theirs = reference(tmp_path)(tokens).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_draft_is_transformers_decoder_layer_between_the_mtp_weights(
    equal_model, tokenizer, tokens, tmp_path
):
    """The MTP layer, put together from the stored tensors and a reference layer."""
    export.write(equal_model, tokenizer, tmp_path)
    round_to_stored(equal_model)
    trunk_layers = equal_model.config.num_hidden_layers
    # As one more trunk layer, transformers loads the MTP layer's decoder.
    layer = reference(tmp_path, num_hidden_layers=trunk_layers + 1).model.layers[-1]
    stored = {
        name.removeprefix(f"model.layers.{trunk_layers}."): tensor.float()
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], stored[name], 1e-6)

    hidden = reference(tmp_path).model(tokens[:, :-1]).last_hidden_state
    embeds = F.embedding(tokens[:, 1:], stored["model.embed_tokens.weight"])
    embeds[:, 0] = 0  # masked, as vLLM does
    x = torch.cat([norm(embeds, "enorm.weight"), norm(hidden, "hnorm.weight")], -1)
    x = x @ stored["eh_proj.weight"].T
    length = x.shape[1]
    positions = torch.arange(length)[None]
    rotary = reference(tmp_path).model.rotary_emb(x, positions)
    mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
    x, _ = layer(
        x, attention_mask=mask, position_embeddings=rotary, position_ids=positions
    )
    theirs = norm(x, "shared_head.norm.weight") @ stored["lm_head.weight"].T

    ours = equal_model.logits(
        equal_model.draft(equal_model.trunk(tokens[:, :-1]), tokens[:, 1:])
    )
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 3, SLOT_BLOCK - 1, 4 * SLOT_BLOCK + 1])
def test_experts_see_their_own_tokens(equal_model, num_tokens):
    moe = equal_model.layers[1].mlp
    x = torch.randn(1, num_tokens, 64)
    weights, experts = moe.gate(x[0])
    expected = moe.shared_experts(x)
    for token in range(num_tokens):
        for weight, expert in zip(weights[token], experts[token]):
            gate, up = (moe.gate_up[expert] @ x[0, token]).chunk(2)
            expected[0, token] += weight * (moe.down[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(moe(x), expected, atol=1e-5, rtol=1e-5)


def test_bias_chooses_and_does_not_weigh(equal_model):
    router = equal_model.layers[1].mlp.gate
    x = torch.randn(50, 64)
    router.e_score_correction_bias.zero_()[4] = 10.0
    weights, experts = router(x)
    assert (experts == 4).any(dim=1).all()
    scores = torch.sigmoid(x @ router.weight.T).gather(1, experts)
    expected = scores / scores.sum(1, keepdim=True) * 1.5
    torch.testing.assert_close(weights, expected)


def test_balancing_moves_the_bias_against_the_load(equal_model):
    router = equal_model.layers[1].mlp.gate.train()
    router.e_score_correction_bias.zero_()
    _, experts = router(torch.randn(64, 64))
    counts = torch.bincount(experts.flatten(), minlength=6).float()
    router.balance(0.01)
    expected = 0.01 * (counts.mean() - counts).sign()
    torch.testing.assert_close(router.e_score_correction_bias, expected)
    assert not router.load.any()


def test_dropout_keeps_the_mean_and_the_share():
    torch.manual_seed(0)
    x = dropout(torch.ones(1 << 16), 0.25)
    assert x.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (x == 0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert dropout(x, 0.0) is x


@pytest.mark.parametrize("name", RECIPES)
def test_learning_rate_rises_holds_and_falls(name):
    recipe = RECIPES[name]
    rates = [recipe.lr(step) for step in range(recipe.steps)]
    assert max(rates) == recipe.peak_lr
    assert rates[0] == pytest.approx(recipe.peak_lr / recipe.warmup)
    assert rates[-1] == pytest.approx(recipe.peak_lr / recipe.decay)
    top = rates.index(recipe.peak_lr)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


@torch.no_grad()
def test_bits_per_byte_is_the_text_s_negative_log_likelihood(equal_model, tokens):
    chapters = list(tokens)
    nats = 0.0
    for chapter in chapters:
        chances = equal_model.logits(equal_model.trunk(chapter[None]))[0].softmax(-1)
        nats -= sum(
            math.log(chances[place, token]) for place, token in enumerate(chapter[1:])
        )
    measured = summary(heldout_sums(equal_model, chapters), num_bytes=1000)
    assert measured["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / 1000, rel=1e-5
    )


@torch.no_grad()
def test_agreement_compares_a_draft_with_the_trunk_one_token_later(equal_model, tokens):
    """Position by position, each on the text up to it alone."""
    tokens = tokens[:, :16]
    right = drafts = 0
    for chapter in tokens:
        for end in range(2, len(chapter)):
            text = chapter[None, :end]
            hidden = equal_model.trunk(text)
            draft = equal_model.draft(hidden[:, :-1], text[:, 1:])
            drafted = equal_model.logits(draft)[0, -1].argmax()
            right += int(drafted == equal_model.logits(hidden)[0, -1].argmax())
            drafts += 1
    measured = summary(heldout_sums(equal_model, list(tokens)), num_bytes=1)
    assert measured["mtp_agreement"] == pytest.approx(right / drafts)


def test_greedy_completion_is_repeatable_and_sampling_follows_its_seed(
    equal_model, tokenizer
):
    def run(temperature, seed):
        return complete(equal_model, tokenizer, "And God", 8, temperature, seed)

    assert run(0.0, 1) == run(0.0, 2)
    assert run(2.0, 1) == run(2.0, 1)
    assert len({run(2.0, seed) for seed in range(4)}) > 1
