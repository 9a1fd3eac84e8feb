# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""An EXL3 checkpoint on the hub is checked before it is downloaded."""

import json

import pytest
from huggingface_hub import constants
from transformers import GlmMoeDsaConfig

from exl3.checkpoint.plan import read_plan
from exl3.format.errors import CheckpointError
from tests import plans
from tests.header_files import dense, experts, tail, write_folder
from tests.hub import Hub
from vllm.transformers_utils import checkpoint as reading
from vllm.transformers_utils import exl3, expert_widths

REPO = "org/pack"
CONFIG = {
    **plans.CONFIG,
    "num_nextn_predict_layers": 0,
    "n_routed_experts_per_layer": [0, 5],
    "hybrid_tr3_tail": tail(2, (1, 1), 5),
}


def config_of(fields) -> GlmMoeDsaConfig:
    config = GlmMoeDsaConfig(**fields)
    config.architectures = ["GlmMoeDsaForCausalLM"]
    return config


@pytest.fixture
def pack(tmp_path):
    tensors = experts("model.layers.1", 5, ranks=2, bits=4)
    tensors |= dense("model.layers.0.mlp.down_proj", 12288, 2560)
    return write_folder(tmp_path / "pack", tensors, CONFIG, shards=2)


@pytest.fixture
def hub(pack, tmp_path, monkeypatch):
    """Only the config has been fetched, as it is when a config is resolved."""
    cached = tmp_path / "cached"
    cached.mkdir()
    (cached / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda *_, **__: str(cached / "config.json"),
    )
    with Hub({REPO: pack}) as hub:
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.cached = cached
        reading._on_hub.cache_clear()
        yield hub
        reading._on_hub.cache_clear()


def test_its_plan_is_known_from_its_headers(pack, hub):
    found = reading.known_checkpoint(REPO, None)
    assert found is not None and found.plan == read_plan(pack, CONFIG)
    config = config_of(CONFIG)
    exl3.resolve_config(config, REPO, None)
    expert_widths.resolve_config(config, REPO, None)
    assert config.quantization_config["quant_method"] == "exl3"
    assert config.resolved_expert_widths == [0, 5]
    assert hub.sent < 1e6 < sum(file.stat().st_size for file in pack.iterdir())
    assert len([line for line in hub.requests if "/api/models/" in line]) == 1
    # The loader still has to fetch it.
    assert reading.stored_checkpoint(REPO, None) is None
    assert exl3.checkpoint_plan(REPO, None) is None


def test_one_that_cannot_be_served_is_refused_before_a_weight_is_sent(pack, hub):
    tensors = experts("model.layers.1", 5, ranks=2, bits=4)
    del tensors["model.layers.1.mlp.experts.3.up_proj.rank1.suh"]
    write_folder(pack, tensors, CONFIG, shards=2)
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj\.rank1: the trell"):
        exl3.resolve_config(config_of(CONFIG), REPO, None)


def test_widths_that_contradict_it_are_refused(pack, hub):
    fields = CONFIG | {"n_routed_experts_per_layer": [0, 4]}
    with pytest.raises(CheckpointError, match="gives layer 1 a width of 4, but"):
        expert_widths.resolve_config(config_of(fields), REPO, None)


def test_without_the_hub_it_is_checked_later(hub, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert reading.known_checkpoint(REPO, None) is None
    config = config_of(CONFIG)
    exl3.resolve_config(config, REPO, None)
    assert config.quantization_config["quant_method"] == "exl3"


def test_nothing_is_asked_for_other_models(hub):
    fields = {name: at for name, at in CONFIG.items() if name != "hybrid_tr3_tail"}
    (hub.cached / "config.json").write_text(json.dumps(fields))
    assert reading.known_checkpoint(REPO, None) is None
    assert not hub.requests
