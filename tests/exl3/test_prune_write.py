# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What is written when experts go: tensors, metadata, and the function they make."""

import json

import pytest
import torch
from safetensors.torch import load_file

from exl3 import cli
from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.plan import read_checkpoint, read_config
from exl3.format.errors import CheckpointError
from exl3.model import StreamedModel
from exl3.tools.prune.layers import read_source
from exl3.tools.prune.record import RECORD_FILE
from tests.checkpoints import write_checkpoint
from tests.damage import with_json, with_tensors
from tests.packs import Format, write_pack
from tests.serving.oracle import load_reference

#: Of 8 experts in layers 1, 2 and the draft's.
KEPT = {1: [0, 2, 3, 5, 7], 2: [1, 4, 6], 3: [0, 1, 6, 7]}
WIDTHS = [0, 5, 3, 4]
TOKENS = torch.arange(3, 43)[None]


def tensors_of(folder):
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def prune(source, out, kept=KEPT):
    profile = out.with_name(f"{out.name}-profile.json")
    profile.write_text(json.dumps({"layers": kept}))
    code = cli.main(["prune", str(source), str(out), "--profile", str(profile)])
    assert code == 0
    return out


def refusal(source, out, capsys, kept=KEPT):
    profile = out.with_name(f"{out.name}-profile.json")
    profile.write_text(json.dumps({"layers": kept}))
    code = cli.main(["prune", str(source), str(out), "--profile", str(profile)])
    found, error = capsys.readouterr()
    assert (code, found) == (1, "")
    assert error.startswith("exl3: ") and error.count("\n") == 1
    assert not out.exists()
    assert not out.with_name(f".{out.name}.partial").exists()
    return error


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("dense") / "source", shards=2)


def test_all_experts_kept_change_no_bit(dense, tmp_path):
    out = prune(dense, tmp_path / "out", {})
    before, after = tensors_of(dense), tensors_of(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    assert read_config(out) == read_config(dense)
    for file in "tokenizer.json", "tokenizer_config.json":
        assert (out / file).read_bytes() == (dense / file).read_bytes()


def test_an_expert_goes_from_gate_bias_and_experts_alike(dense, tmp_path):
    out = prune(dense, tmp_path / "out")
    before, after = tensors_of(dense), tensors_of(out)
    expected = {}
    for name, tensor in before.items():
        parts = name.split(".")
        kept = KEPT.get(int(parts[2])) if parts[1] == "layers" else None
        if kept and parts[4] == "gate":
            expected[name] = tensor[kept]
        elif kept and parts[4] == "experts":
            if int(parts[5]) in kept:
                parts[5] = str(kept.index(int(parts[5])))
                expected[".".join(parts)] = tensor
        else:
            expected[name] = tensor
    assert expected.keys() == after.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, after[name]), name
    config = read_config(out)
    assert config["n_routed_experts"] == 5
    assert config["n_routed_experts_per_layer"] == WIDTHS
    assert resolve_widths(config, read_checkpoint(out, config).widths) == tuple(WIDTHS)
    record = json.loads((out / RECORD_FILE).read_text())
    assert record["layers"]["2"] == {"width": 8, "kept": KEPT[2]}
    assert record["source"] == dense.name


def test_one_width_throughout_needs_no_list(dense, tmp_path):
    out = prune(dense, tmp_path / "out", {layer: [1, 2, 4] for layer in KEPT})
    config = read_config(out)
    assert config == read_config(dense) | {"n_routed_experts": 3}


@torch.no_grad()
@pytest.mark.parametrize(
    ("experts", "groups", "kept"),
    [
        (8, (1, 1), KEPT),
        (8, (2, 1), {1: [0, 3, 5, 7], 2: [1, 2, 3, 4, 5, 6], 3: [0, 1, 4, 6]}),
        (16, (4, 2), {1: [0, 1, 4, 6, 9, 10, 13, 14], 2: [1, 3, 5, 6, 8, 11, 12, 15]}),
    ],
    ids=["ungrouped", "2-groups", "4-groups"],
)
def test_the_rest_routes_as_if_the_others_were_never_chosen(
    tmp_path, experts, groups, kept
):
    """Hugging Face's model, the removed experts' bias at -inf, against the pruned."""
    source = write_checkpoint(
        tmp_path / "source",
        experts=experts,
        n_group=groups[0],
        topk_group=groups[1],
        dtype="float32",
    )
    out = prune(source, tmp_path / "out", kept)
    reference = load_reference(source)
    for layer in 1, 2:
        gone = [expert for expert in range(experts) if expert not in kept[layer]]
        bias = reference.model.layers[layer].mlp.gate.e_score_correction_bias
        bias[gone] = float("-inf")
    expected = reference(TOKENS).logits
    model = StreamedModel.open(out)
    hidden = model.embed(TOKENS)
    for layer in model.layers():
        hidden = layer(hidden)
    # Both compute in float32; only the order of sums over experts differs.
    torch.testing.assert_close(model.head(hidden), expected, rtol=1e-4, atol=1e-4)
    whole = load_reference(source)(TOKENS).logits
    assert not torch.allclose(whole, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "stored",
    [
        {"formats": (Format(3), Format(4, "mul1"), Format(5))},
        {"ranks": 2, "formats": (Format(3), Format(4))},
        {"ranks": 2, "formats": (Format(3),), "shared_h": True},
        {"ranks": 2, "formats": (Format(3), Format(5)), "draft": set()},
        {"legacy_signs": True, "formats": (Format(2, "3inst"),)},
    ],
    ids=["plain", "sliced-mixed", "shared-h", "dense-draft", "legacy-signs"],
)
def test_packs_keep_their_trellises(tmp_path, stored):
    pack = write_pack(tmp_path / "pack", shards=2, **stored)
    out = prune(pack.path, tmp_path / "out")
    twin = prune(pack.twin, tmp_path / "twin")
    config = read_config(out)
    checkpoint = read_checkpoint(out, config)
    assert checkpoint.plan.is_exl3
    before = read_checkpoint(pack.path, read_config(pack.path)).plan.warnings
    assert checkpoint.plan.warnings == before
    assert resolve_widths(config, checkpoint.widths) == tuple(WIDTHS)
    decoded, expected = StreamedModel.open(out).tensors, tensors_of(twin)
    for name, weight in expected.items():
        module = name.removesuffix(".weight")
        if module != name:
            found = decoded.dense(module, weight.shape).float()
            # Another decoder in float32 may round the last bits in another way.
            torch.testing.assert_close(found, weight.float(), msg=name)
    storage = json.loads((out / "quantization_config.json").read_text())
    for entry in storage["tensor_storage"].values():
        for name, about in entry["stored_tensors"].items():
            assert list(decoded.read(name).shape) == about["shape"], name


def test_a_pack_says_its_widths_in_both_files(tmp_path):
    pack = write_pack(tmp_path / "pack", ranks=2, formats=(Format(3), Format(4)))

    def move(content):
        tail = read_config(pack.path)["hybrid_tr3_tail"]
        content["rank_sliced"] = tail | {"tr3_tail_per_layer": 8}

    source = with_json(pack.path, tmp_path / "both", move, "quantization_config.json")
    out = prune(source, tmp_path / "out")
    again = json.loads((out / "quantization_config.json").read_text())["rank_sliced"]
    tail = read_config(out)["hybrid_tr3_tail"]
    assert again == tail
    assert tail["experts_per_layer"] == WIDTHS
    bits = json.loads((out / "tier_bitmap.json").read_text())
    assert [len(bits[str(layer)]["k"]) for layer in KEPT] == WIDTHS[1:]


def test_stacked_experts_lose_rows(dense, tmp_path):
    def stack(tensors):
        for layer in KEPT:
            name = f"model.layers.{layer}.mlp.experts"
            of = [
                [tensors.pop(f"{name}.{at}.{part}_proj.weight") for at in range(8)]
                for part in ("gate", "up", "down")
            ]
            gate, up, down = map(torch.stack, of)
            tensors[f"{name}.gate_up_proj"] = torch.cat([gate, up], 1)
            tensors[f"{name}.down_proj"] = down

    source = with_tensors(dense, tmp_path / "stacked", stack)
    out = prune(source, tmp_path / "out")
    before, after = tensors_of(source), tensors_of(out)
    for layer, kept in KEPT.items():
        for name in "experts.gate_up_proj", "experts.down_proj", "gate.weight":
            name = f"model.layers.{layer}.mlp.{name}"
            assert torch.equal(after[name], before[name][kept])
    assert read_source(source).num_bytes(KEPT) == read_source(out).num_bytes({})


def test_weights_of_other_formats_are_kept_as_they_are(dense, tmp_path):
    def to_fp8(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(2, 2)

    source = with_tensors(dense, tmp_path / "fp8", to_fp8)
    before, after = tensors_of(source), tensors_of(prune(source, tmp_path / "out"))
    for field in "weight", "weight_scale_inv":
        name = "model.layers.2.mlp.experts.{}.down_proj." + field
        for at, expert in enumerate(KEPT[2]):
            one, other = after[name.format(at)], before[name.format(expert)]
            assert one.dtype == other.dtype
            assert torch.equal(one.float(), other.float())
        assert name.format(3) not in after


def test_the_size_is_known_before(dense, tmp_path):
    source = read_source(dense)
    out = read_source(prune(dense, tmp_path / "out"))
    assert source.num_bytes(KEPT) == out.num_bytes({})


def test_every_spelling_of_the_widths_gives_way_to_one(tmp_path):
    source = write_checkpoint(
        tmp_path / "source",
        widths=[0, 8, 6, 7],
        num_experts_per_layer=[8, 6, 7],
        reap_pruning={"n_routed_experts_per_layer": [8, 6], "seed": 1},
    )
    out = prune(source, tmp_path / "out", {1: [1, 3, 5], 2: [0, 5], 3: [6, 0]})
    config = read_config(out)
    assert config["n_routed_experts_per_layer"] == [0, 3, 2, 2]
    assert config["reap_pruning"] == {"seed": 1}
    assert "num_experts_per_layer" not in config
    resolve_widths(config, read_checkpoint(out, config).widths)


def test_the_text_model_of_a_multimodal_one(dense, tmp_path):
    def nest(config):
        text = dict(config)
        config.clear()
        config |= {"architectures": text.pop("architectures"), "text_config": text}

    out = prune(with_json(dense, tmp_path / "nested", nest), tmp_path / "out")
    config = read_config(out)
    assert config.keys() == {"architectures", "text_config"}
    assert config["text_config"]["n_routed_experts_per_layer"] == WIDTHS
    assert config["text_config"]["n_routed_experts"] == 5


def test_a_draft_under_names_of_its_own(dense, tmp_path):
    def rename(tensors):
        for name in [name for name in tensors if "layers.3." in name]:
            other = name.replace("model.layers.3", "mtp.layers.0")
            tensors[other] = tensors.pop(name)

    source = with_tensors(dense, tmp_path / "mtp", rename)
    before, after = tensors_of(source), tensors_of(prune(source, tmp_path / "out"))
    name = "mtp.layers.0.mlp.experts.{}.up_proj.weight"
    for at, expert in enumerate(KEPT[3]):
        assert torch.equal(after[name.format(at)], before[name.format(expert)])
    assert name.format(4) not in after
    assert len(after["mtp.layers.0.mlp.gate.weight"]) == 4


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def add(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            drop(*[f"model.layers.{n}.mlp.gate.weight" for n in KEPT]),
            "no layer has a r",
        ),
        (
            drop(
                "model.layers.1.mlp.experts.7.up_proj.weight",
                "model.layers.1.mlp.experts.7.gate_proj.weight",
                "model.layers.1.mlp.experts.7.down_proj.weight",
            ),
            "expert 7 is missing",
        ),
        (add("model.layers.1.mlp.gate.qweight", 8, 3), "mlp.gate.qweight belongs to"),
        (add("model.layers.1.mlp.experts.act.weight", 8), "experts.act.weight belongs"),
        (add("model.layers.2.mlp.experts.01.up_proj.weight", 8), "experts.01.up_proj"),
        (add("model.layers.9.mlp.gate.weight", 8, 256), "is of layer 9; use"),
    ],
)
def test_what_cannot_be_pruned_is_refused(dense, tmp_path, capsys, change, message):
    source = with_tensors(dense, tmp_path / "bad", change)
    assert message in refusal(source, tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("layers.2.mlp.experts.", "layer 2: no routed expert is stored for it"),
        (".mlp.experts.", ".mlp.gate.weight: the checkpoint has this router and none"),
    ],
)
def test_experts_that_are_not_there_are_refused(
    dense, tmp_path, capsys, where, message
):
    def remove(tensors):
        for name in [name for name in tensors if where in name]:
            del tensors[name]

    source = with_tensors(dense, tmp_path / "bad", remove)
    line = refusal(source, tmp_path / "out", capsys)
    assert message in line


def test_a_stale_index_is_refused(dense, tmp_path, capsys):
    name = "model.layers.1.mlp.experts.0.up_proj.weight"

    def forget(index):
        index["weight_map"].pop(name)

    def invent(index):
        index["weight_map"]["model.extra"] = index["weight_map"][name]

    index = "model.safetensors.index.json"
    source = with_json(dense, tmp_path / "short", forget, index)
    assert name in refusal(source, tmp_path / "out", capsys)
    source = with_json(dense, tmp_path / "long", invent, index)
    assert "model.extra" in refusal(source, tmp_path / "out", capsys)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"1": [0, 0, 1]}, "layer 1 keeps [0, 0, 1]; expected a list of different"),
        ({"1": [0, 8]}, "expected a list of different experts from 0 to 7"),
        ({"1": [0, True]}, "expected a list of different"),
        ({"1": "all"}, "expected a list of different"),
        ({"1": [3]}, "layer 1 keeps 1 experts; its router needs at least 2"),
        ({"0": [0, 1]}, "layer '0' has no routed experts in"),
        ({"x" * 999: [0, 1]}, "has no routed experts in"),
        ({"1": {"width": 9, "kept": [0, 1]}}, "whose layer 1 has 9 routed experts"),
        ({"1": {"width": 8}}, "layer 1 keeps None"),
    ],
)
def test_hostile_profiles(dense, tmp_path, capsys, layers, message):
    line = refusal(dense, tmp_path / "out", capsys, layers)
    assert message in line
    assert len(line) < 500


def test_a_profile_of_a_grouped_router_keeps_as_many_of_each(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "source", n_group=2, topk_group=1)
    line = refusal(source, tmp_path / "out", capsys, {"2": [0, 1, 2, 3, 4, 5]})
    assert "layer 2 keeps [4, 2] experts of its 2 groups (n_group)" in line


def test_a_router_that_is_exl3_is_refused(tmp_path, capsys):
    pack = write_pack(tmp_path / "pack", trunk={"experts", "gate"})
    line = refusal(pack.path, tmp_path / "out", capsys)
    assert "layers.1.mlp.gate." in line
    assert "store the router as a dense weight with its bias" in line


@pytest.mark.parametrize("text", ["", "[]", "{", '{"layers": []}', "\x00"])
def test_a_profile_that_is_none(dense, tmp_path, capsys, text):
    profile = tmp_path / "profile.json"
    profile.write_text(text)
    out = tmp_path / "out"
    assert cli.main(["prune", str(dense), str(out), "--profile", str(profile)]) == 1
    error = capsys.readouterr().err
    assert "profile.json" in error and error.count("\n") == 1


def test_the_error_class_is_the_checkpoints(dense, tmp_path):
    source = with_tensors(dense, tmp_path / "bad", add("model.layers.1.mlp.gate.x", 8))
    with pytest.raises(CheckpointError, match=r"gate\.x"):
        read_source(source)
