# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A stopped run resumes and ends as if it had not been stopped."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tools.demo_model import train
from tools.demo_model.config import ModelConfig
from tools.demo_model.files import CORPUS_FILE, TOKENIZER_FILE
from tools.demo_model.model import DemoModel

STEPS = 5


@pytest.fixture
def start(tokenizer, tmp_path, monkeypatch):
    """Makes trainers of a small recipe: one worker, an eager two-layer model."""
    verse = "And the earth was without form, and void. " * 3
    text = "\n\n".join([f"{number} {verse}\n{verse}" for number in range(40)]) + "\n"

    def in_folder(name: str) -> train.Trainer:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / CORPUS_FILE).write_text(text)
        tokenizer.save(str(folder / TOKENIZER_FILE))
        return train.Trainer("pretrain", folder)

    recipe = train.Recipe(
        source=None,
        steps=STEPS,
        decay=2,
        peak_lr=1e-2,
        warmup=2,
        batch=4,
        window=32,
        long_every=3,
        long_window=64,
        eval_every=2,
    )
    small = replace(
        ModelConfig(),
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=64,
        moe_intermediate_size=32,
        widths=(0, 4, 4),
        kv_lora_rank=64,
        max_position_embeddings=128,
    )
    monkeypatch.setattr(train, "ModelConfig", lambda: small)
    monkeypatch.setattr(train, "RECIPES", {"pretrain": recipe})
    monkeypatch.setattr(train, "WORKERS", 1)
    monkeypatch.setattr(train, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(DemoModel, "compile_pieces", lambda model: None)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield in_folder
    dist.destroy_process_group()


def lines(trainer: train.Trainer) -> list[dict]:
    log = trainer.log_file.read_text().splitlines()
    return [json.loads(line) for line in log]


def test_resumed_run_is_the_run_that_never_stopped(start):
    whole = start("whole")
    whole.run()

    stopped = start("stopped")
    made = iter(range(3))

    def step(take=stopped.train_step):
        if next(made, None) is None:
            raise KeyboardInterrupt
        return take()

    stopped.train_step = step
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    resumed = start("stopped")
    assert resumed.step == 3
    resumed.run()

    assert resumed.step == whole.step == STEPS
    expected = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    measured = [line for line in lines(resumed) if "bits_per_byte" in line]
    assert measured == [line for line in lines(whole) if "bits_per_byte" in line]
    assert [line["step"] for line in measured] == [2, 4, 5]


def test_training_moves_weights_and_selection_biases(start):
    trainer = start("run")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.run()
    for name, value in trainer.model.state_dict().items():
        assert not torch.equal(value, before[name]), name
