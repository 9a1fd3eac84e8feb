# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The files beside the tensors say of a grafted MTP layer what its tensors do."""

import json
import shutil

import pytest

from exl3.checkpoint.plan import read_config
from tests.checkpoints import write_checkpoint
from tests.damage import with_json, with_tensors
from tests.exl3.grafts import EXPERTS, SMALL, graft, refused, tensors
from tests.packs import write_pack


@pytest.fixture
def base(stored, tmp_path):
    return shutil.copytree(stored.base("sliced"), tmp_path / "base")


@pytest.fixture
def overlay(stored):
    return stored.overlay("sliced")


def test_a_list_of_widths_reaches_the_draft(stored, tmp_path):
    base = write_checkpoint(tmp_path / "base", layers=2, widths=[0, 4, 4])
    with_json(base, tmp_path / "b", lambda it: it["n_routed_experts_per_layer"].pop())
    assert graft(tmp_path / "b", stored.overlay("plain")) == 0
    assert read_config(tmp_path / "b")["n_routed_experts_per_layer"] == [0, 4, 4]


def test_lists_of_ignored_modules(stored, tmp_path, overlay):
    ignored = {
        "quant_method": "modelopt",
        "ignore": ["lm_head", "model.layers.2*", "*.mlp.gate", "re:.*layers\\.2\\..*"],
    }
    base = write_pack(tmp_path / "base", draft=(), ranks=2, stamp=ignored, **SMALL).path
    assert graft(base, overlay) == 0
    kept = read_config(base)["quantization_config"]["ignore"]
    assert kept == ["lm_head", "*.mlp.gate"]


def test_tensor_storage_follows(stored, tmp_path):
    base = shutil.copytree(stored.base("plain"), tmp_path / "base")
    overlay = stored.overlay("plain")
    assert graft(base, overlay) == 0
    ours, theirs = (
        json.loads((folder / "quantization_config.json").read_text())["tensor_storage"]
        for folder in (base, overlay)
    )
    draft = {key for key in theirs if key.startswith(EXPERTS)}
    assert draft
    for key in draft:
        assert ours[key] == theirs[key]


def with_tail(base, tmp_path, **fields):
    """A copy of BASE with other fields in its tail."""

    def change(config):
        tail = config["hybrid_tr3_tail"]
        tail |= fields
        for name in [name for name, value in tail.items() if value is None]:
            del tail[name]

    return with_json(base, tmp_path / "other", change)


@pytest.mark.parametrize("over", ["sliced", "sliced, mixed"])
def test_bits_by_layer(stored, base, tmp_path, over):
    base = with_tail(base, tmp_path, bits=None, trellis_bits_by_layer={"1": 4})
    assert graft(base, stored.overlay(over)) == 0
    tail = read_config(base)["hybrid_tr3_tail"]
    if over == "sliced":
        assert tail["trellis_bits_by_layer"] == {"1": 4, "2": 4}
        return
    assert "trellis_bits_by_layer" not in tail
    assert (tail["bits"], tail["k_values"]) == ("mixed", [3, 4, 5])
    bits = json.loads((base / "bits_map.json").read_text())
    assert bits == {"1": {"k": [4, 4, 4, 4]}, "2": {"k": [5, 3, 5, 3]}}


def test_a_bits_file_gets_the_new_layer(stored, tmp_path):
    base = shutil.copytree(stored.base("sliced, mixed"), tmp_path / "base")
    before = json.loads((base / "tier_bitmap.json").read_text())
    assert graft(base, stored.overlay("sliced, mixed")) == 0
    after = json.loads((base / "tier_bitmap.json").read_text())
    assert after == {**before, "2": {"k": [5, 3, 5, 3]}}
    assert read_config(base)["hybrid_tr3_tail"]["k_values"] == [3, 4, 5]


def test_widths_by_layer_in_an_object(base, overlay, tmp_path):
    base = with_tail(base, tmp_path, experts_per_layer={"1": 4})
    assert graft(base, overlay) == 0
    tail = read_config(base)["hybrid_tr3_tail"]
    assert tail["experts_per_layer"] == {"1": 4, "2": 4}


def test_a_tail_that_counted_the_dense_layer_already(stored, base, tmp_path):
    base = with_tail(base, tmp_path, moe_layers=[1, 2])
    assert graft(base, stored.overlay("plain")) == 0
    assert read_config(base)["hybrid_tr3_tail"]["moe_layers"] == [1, 1]


def test_a_tail_that_ends_too_early(tmp_path, capsys):
    def trunk_layer_2_dense(found):
        for name in [name for name in found if "layers.2.mlp.experts" in name]:
            del found[name]
        found |= {n: t for n, t in dense.items() if "layers.2.mlp.experts" in n}

    sizes = {"layers": 3, "experts": 2}
    dense = tensors(write_checkpoint(tmp_path / "dense", **sizes))
    pack = write_pack(tmp_path / "pack", ranks=2, draft=(), **sizes).path
    base = with_tail(
        with_tensors(pack, tmp_path / "cut", trunk_layer_2_dense),
        tmp_path,
        moe_layers=[1, 1],
    )
    overlay = write_pack(tmp_path / "over", ranks=2, **sizes).path
    assert "moe_layers ends with layer 1" in refused(capsys, base, overlay)


def test_a_multimodal_config_says_it_twice(base, overlay, tmp_path):
    def nest(config):
        text = dict(config)
        tail = text["hybrid_tr3_tail"]
        config.clear()
        config |= {"text_config": text, "hybrid_tr3_tail": tail}

    base = with_json(base, tmp_path / "nested", nest)
    over = with_json(overlay, tmp_path / "over", nest)
    assert graft(base, over) == 0
    config = read_config(base)
    assert config["hybrid_tr3_tail"]["moe_layers"] == [1, 2]
    assert config["text_config"]["hybrid_tr3_tail"] == config["hybrid_tr3_tail"]
    assert "quantization_config" not in config
