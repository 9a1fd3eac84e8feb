# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""An EXL3 MTP layer goes into a checkpoint and out again, and only one that fits."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.plan import read_checkpoint, read_config
from tests.checkpoints import write_checkpoint
from tests.damage import draft_alone, with_json, with_tensors
from tests.exl3.grafts import (
    BASES,
    DRAFT,
    EXPERTS,
    OVERLAYS,
    SMALL,
    graft,
    refused,
    tensors,
)
from tests.exl3.interruptions import contents
from tests.packs import write_pack


@pytest.fixture
def base(stored, tmp_path):
    return shutil.copytree(stored.base("sliced"), tmp_path / "base")


@pytest.fixture
def overlay(stored):
    return stored.overlay("sliced")


def equal(one, other):
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("over", OVERLAYS)
@pytest.mark.parametrize("under", BASES)
def test_goes_in_and_out(stored, tmp_path, under, over):
    base = shutil.copytree(stored.base(under), tmp_path / "base")
    overlay = stored.overlay(over)
    before, trunk, draft = contents(base), tensors(base), tensors(overlay)
    assert graft(base, overlay) == 0

    config = read_config(base)
    found, wanted = (
        read_checkpoint(folder, read_config(folder)).plan.experts[EXPERTS]
        for folder in (base, overlay)
    )
    assert found == wanted
    if wanted.sliced:
        tail = config["hybrid_tr3_tail"]
        assert tail["moe_layers"] == [1 if "sliced" in under else 2, 2]
        assert tail["tp"] == 2
    assert config["quantization_config"]["quant_method"] == "exl3"

    after = tensors(base)
    expected = {
        name: tensor for name, tensor in trunk.items() if not name.startswith(DRAFT)
    } | {name: tensor for name, tensor in draft.items() if name.startswith(DRAFT)}
    assert after.keys() == expected.keys()
    for name, tensor in expected.items():
        assert equal(after[name], tensor), name

    assert graft(base, "--revert") == 0
    assert contents(base) == before


def test_nothing_of_the_draft_is_warned_of(base, overlay):
    assert graft(base, overlay) == 0
    plan = read_checkpoint(base, read_config(base)).plan
    (warning,) = plan.warnings
    assert "dense weights have an EXL3 matrix" in warning


def test_a_dense_layer_that_is_the_same_is_not_stored_again(base, overlay):
    size = (base / "model.safetensors.index.json").stat().st_size
    assert graft(base, overlay) == 0
    added = load_file(base / "model-mtp-exl3-00001-of-00001.safetensors")
    assert not any(name.endswith("proj.weight") for name in added)
    assert not any("norm" in name or "eh_proj" in name for name in added)
    assert size


@pytest.mark.parametrize("under", ["dense", "plain", "sliced", "sliced, mixed"])
@pytest.mark.parametrize("ranks", [None, 2])
def test_another_width_brings_its_router(stored, tmp_path, under, ranks):
    base = shutil.copytree(stored.base(under), tmp_path / "base")
    overlay = write_pack(
        tmp_path / "over", layers=2, widths=[0, 4, 3], ranks=ranks, draft=None
    ).path
    before = contents(base)
    assert graft(base, overlay) == 0
    config = read_config(base)
    checkpoint = read_checkpoint(base, config)
    assert checkpoint.plan.experts[EXPERTS].width == 3
    assert resolve_widths(config, checkpoint.widths) == (0, 4, 3)
    assert config["n_routed_experts_per_layer"] == [0, 4, 3]
    if ranks and "sliced" in under:
        assert config["hybrid_tr3_tail"]["experts_per_layer"] == [0, 4, 3]
    # Readers take whole files: no second gate is left in any.
    gates = [
        name
        for file in base.glob("*.safetensors")
        for name in load_file(file)
        if name.startswith(f"{DRAFT}mlp.gate.")
    ]
    assert sorted(gates) == [
        f"{DRAFT}mlp.gate.e_score_correction_bias",
        f"{DRAFT}mlp.gate.weight",
    ]
    assert graft(base, "--revert") == 0
    assert contents(base) == before


def test_a_checkpoint_without_an_index_gets_one_and_loses_it(stored, tmp_path):
    base = shutil.copytree(stored.base("sliced"), tmp_path / "base")
    (base / "model.safetensors.index.json").unlink()
    (base / "model-00001-of-00001.safetensors").rename(base / "model.safetensors")
    before = contents(base)
    assert graft(base, stored.overlay("sliced")) == 0
    index = json.loads((base / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in tensors(base).values()
    )
    assert graft(base, "--revert") == 0
    assert contents(base) == before


def test_a_checkpoint_without_a_draft_gets_one(stored, tmp_path, overlay, capsys):
    base = write_checkpoint(
        tmp_path / "base", mtp=0, num_nextn_predict_layers=0, **SMALL
    )
    assert graft(base, overlay) == 0
    assert read_config(base)["num_nextn_predict_layers"] == 1
    assert EXPERTS in read_checkpoint(base, read_config(base)).plan.experts
    assert graft(base, "--revert") == 0

    def experts_only(found):
        for name in list(found):
            if not name.startswith(EXPERTS):
                del found[name]

    alone = with_tensors(overlay, tmp_path / "experts", experts_only)
    assert "has only the experts of an MTP layer" in refused(capsys, base, alone)


def test_an_overlay_of_the_draft_alone(overlay, base, tmp_path):
    alone = draft_alone(overlay, tmp_path / "alone")
    assert graft(base, alone) == 0
    assert EXPERTS in read_checkpoint(base, read_config(base)).plan.experts


def test_a_dry_run_says_what_and_does_nothing(base, overlay, capsys):
    before = contents(base)
    base.chmod(0o555)
    assert graft(base, overlay, "--dry-run") == 0
    lines = capsys.readouterr().out
    assert "adds model-mtp-exl3-00001-of-00001.safetensors: " in lines
    assert "hybrid_tr3_tail.moe_layers: [1, 1] becomes [1, 2]" in lines
    assert "config.json.orig" in lines
    base.chmod(0o755)
    assert contents(base) == before
    assert graft(base, overlay) == 0
    grafted = contents(base)
    assert graft(base, "--revert", "--dry-run") == 0
    assert contents(base) == grafted


def test_the_edits_for_programs(base, overlay, capsys):
    def told(*arguments):
        capsys.readouterr()
        assert graft(base, *arguments, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert report["folder"] == str(base)
        return report["outcome"], report["edits"]

    before = contents(base)
    outcome, planned = told(overlay, "--dry-run")
    assert outcome == "planned" and contents(base) == before
    assert told(overlay) == ("grafted", planned)
    after = contents(base)
    kinds = {
        kind: [edit for edit in planned if edit["edit"] == kind]
        for kind in ("adds", "changes", "keeps")
    }
    shard, *_ = kinds["adds"]
    added = load_file(base / shard["file"]).values()
    assert shard["tensors"] == len(added)
    assert shard["bytes"] == sum(tensor.nbytes for tensor in added)
    changed = {edit["file"] for edit in kinds["changes"]}
    assert "config.json" in changed
    kept = {edit["file"] for edit in kinds["keeps"]}
    assert kept == {name for name in after if name.endswith(".orig")}
    assert {f"{name}.orig" for name in changed} <= kept
    for options, outcome in ((["--dry-run"], "planned"), ([], "reverted")):
        assert contents(base) == after
        found, edits = told("--revert", *options)
        assert found == outcome
        assert {edit["file"] for edit in edits if edit["edit"] == "restores"} == {
            name.removesuffix(".orig") for name in kept
        }
        removed = {edit["file"] for edit in edits if edit["edit"] == "removes"}
        assert removed == after.keys() - before.keys() - kept - {"exl3-graft.json"}
    assert contents(base) == before


def test_a_folder_of_links_gets_its_links_back(overlay, base, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for file in base.iterdir():
        (links / file.name).symlink_to(file)
    before = contents(base)
    assert graft(links, overlay) == 0
    assert contents(base) == before
    assert graft(links, "--revert") == 0
    assert all(path.is_symlink() for path in links.iterdir())
    assert contents(links) == before


def test_not_twice_and_no_revert_of_nothing(base, overlay, capsys):
    assert "nothing was grafted" in refused(capsys, base, "--revert")
    assert graft(base, overlay) == 0
    after = contents(base)
    assert "is grafted already, with" in refused(capsys, base, overlay)
    assert contents(base) == after
    (base / "config.json.orig").unlink()
    assert "config.json.orig: is gone" in refused(capsys, base, "--revert")


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"hidden": 384}, "hidden_size 384, and that of"),
        ({"layers": 3}, "num_hidden_layers 3, and that of"),
        ({"moe_intermediate_size": 512}, "moe_intermediate_size 512"),
        ({"ranks": 1}, "is stored in 1 slices, and"),
        ({"shared_h": True}, "vectors that its experts share"),
        ({"draft": ()}, "has no EXL3 MTP layer: layer 2 is dense"),
        ({"mtp": 0}, "has no EXL3 MTP layer: layer 2 is not there"),
    ],
    ids=str,
)
def test_a_layer_that_does_not_fit(other, line, base, tmp_path, capsys):
    before = contents(base)
    pack = write_pack(tmp_path / "o", **{**SMALL, "ranks": 2, **other}).path
    assert line in refused(capsys, base, pack)
    assert contents(base) == before


def test_a_codebook_that_slices_do_not_have(stored, tmp_path, capsys):
    base = shutil.copytree(stored.base("dense"), tmp_path / "base")

    def to_mul1(found):
        for name in [name for name in found if name.endswith(".mcg")]:
            del found[name]
            found[name.replace(".mcg", ".mul1")] = torch.tensor(
                0x83DCD12D - 2**32, dtype=torch.int32
            )

    sliced = stored.overlay("sliced")
    other = with_tensors(sliced, tmp_path / "other", to_mul1)
    with_json(other, tmp_path / "o", lambda config: config.pop("hybrid_tr3_tail"))
    assert "has codebook mul1, and slices have mcg" in refused(
        capsys, base, tmp_path / "o"
    )


def test_a_base_whose_draft_is_exl3(stored, tmp_path, overlay, capsys):
    base = shutil.copytree(overlay, tmp_path / "base")
    before = contents(base)
    assert "its MTP layer is EXL3 already" in refused(capsys, base, overlay)
    assert "is BASE itself" in refused(capsys, base, base)
    assert contents(base) == before


def test_a_file_in_the_way_is_named(base, overlay, capsys):
    (base / "config.json.orig").write_text("mine")
    before = contents(base)
    assert "config.json.orig: is there already" in refused(capsys, base, overlay)
    assert contents(base) == before


def test_arguments_that_contradict_each_other(base, overlay, capsys):
    assert "--revert takes BASE alone" in refused(capsys, base, overlay, "--revert")
    assert "takes BASE and OVERLAY" in refused(capsys, base)
