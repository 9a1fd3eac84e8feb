# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 inspect` prints the plan, or one line that says why there is none."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from exl3 import cli
from exl3.checkpoint.plan import read_plan
from exl3.format.errors import CheckpointError
from tests import plans
from tests.header_files import dense, experts, linear, tail, write_folder

CONFIG = {
    **plans.CONFIG,
    "hybrid_tr3_tail": tail(2, (1, 1), 4, trellis_bits_by_layer={"1": 3}),
}


@pytest.fixture
def pack(tmp_path):
    tensors = dense("model.embed_tokens", 256, 500) | linear("lm_head", 256, 512, 6)
    tensors |= linear("model.layers.0.self_attn.q_proj", 256, 512, 5, "mul1")
    tensors |= experts("model.layers.1", 4, ranks=2, bits=3)
    tensors |= dense("model.layers.2.mlp.experts.0.up_proj", 256, 256)
    tensors |= dense("model.layers.2.mlp.experts.1.up_proj", 256, 256)
    return write_folder(tmp_path / "pack", tensors, CONFIG, shards=2)


def lines(capsys):
    out, err = capsys.readouterr()
    assert not err
    return out.splitlines()


def test_the_plan_is_a_table(pack, capsys):
    assert cli.main(["inspect", str(pack)]) == 0
    found = lines(capsys)
    table = [line.split("  ") for line in found[: found.index("")]]
    table = [[cell.strip() for cell in row if cell.strip()] for row in table]
    assert [row[:-1] for row in table[1:]] == [
        ["0", "dense", "-", "-", "K5 x1", "mul1", "-", "5.00"],
        ["1", "MoE", "4", "K3 x4", "-", "mcg", "2 slices", "3.00"],
        ["2", "MTP", "2", "BF16 x2", "-", "-", "whole", "-"],
        ["-", "other", "-", "-", "K6 x1", "mcg", "-", "6.00"],
    ]
    text = "\n".join(found)
    assert "draft (MTP): dense" in text
    assert "tensor parallel: 1, 2\n" in text
    assert "not 4: model.layers.1.mlp.experts: 2 slices of 128" in text


def test_the_json_has_every_byte(pack, capsys):
    assert cli.main(["inspect", str(pack), "--json"]) == 0
    report = json.loads("\n".join(lines(capsys)))
    assert report["is_exl3"]
    assert report["draft"] == "dense"
    stored = sum(file.stat().st_size for file in pack.glob("*.safetensors"))
    headers = sum(
        8 + int.from_bytes(file.read_bytes()[:8], "little")
        for file in pack.glob("*.safetensors")
    )
    assert report["exl3_bytes"] + report["dense_bytes"] == stored - headers
    assert report["dense_bytes"] == 2 * (256 * 500 + 4 * 256 + 2 * 256 * 256)
    assert report["layers"][1]["experts"] == {"3": 4}
    assert report["tensor_parallel"] == [1, 2]
    assert [layer["kind"] for layer in report["layers"]] == [
        *("dense", "MoE", "MTP", "other")
    ]
    weights = {5: 256 * 512, 3: 4 * 3 * 256 * 256, 6: 256 * 512}
    assert report["exl3_weights"] == sum(weights.values())
    mean = sum(bits * count for bits, count in weights.items()) / sum(weights.values())
    assert report["bits_per_weight"] == pytest.approx(mean, abs=1e-4)
    assert report["problems"] == []


def test_weights_that_exl3_took_the_place_of_are_told_apart(tmp_path, capsys):
    """Such as a graft leaves of a draft layer that was dense."""
    config = {"num_hidden_layers": 1, "n_routed_experts": 2, "num_experts_per_tok": 1}
    name = "model.layers.1"
    kept = experts("model.layers.0", 2) | dense("model.layers.0.input_norm", 1, 256)
    kept |= experts(name, 2, ranks=2) | linear(f"{name}.self_attn.o_proj", 256, 256)
    stale = dense(f"{name}.self_attn.o_proj", 256, 256)
    stale |= dense(f"{name}.mlp.experts.0.down_proj", 256, 256)
    stale |= {f"{name}.mlp.experts.gate_up_proj": ("BF16", (2, 512, 256))}

    def report(tensors, folder):
        write_folder(folder, tensors, config)
        assert cli.main(["inspect", str(folder), "--json"]) == 0
        return json.loads("\n".join(lines(capsys)))

    without, found = report(kept, tmp_path / "a"), report(kept | stale, tmp_path / "b")
    size = 2 * 256 * (256 + 256 + 2 * 512)
    assert without["superseded_bytes"] == 0 and found["superseded_bytes"] == size
    assert found["layers"][1].pop("superseded_bytes") == size
    del without["layers"][1]["superseded_bytes"]
    for of in without, found:
        del of["superseded_bytes"], of["path"], of["tensors"], of["warnings"]
    assert found == without
    assert cli.main(["inspect", str(tmp_path / "b")]) == 0
    assert "\nnot loaded: 768.00 KiB of dense weights" in "\n".join(lines(capsys))


def test_alike_layers_share_a_line_unless_all_are_asked_for(tmp_path, capsys):
    tensors = {}
    for layer, bits in enumerate((4, 4, 4, 5, 4)):
        tensors |= linear(f"model.layers.{layer}.self_attn.o_proj", 256, 256, bits)
    write_folder(tmp_path, tensors, {"num_hidden_layers": 5})

    def layers(*options):
        assert cli.main(["inspect", str(tmp_path), *options]) == 0
        return [line.split()[0] for line in lines(capsys)[1:] if " dense " in line]

    assert layers() == ["0-2", "3", "4"]
    assert layers("--all") == ["0", "1", "2", "3", "4"]


def test_many_kinds_of_experts_are_summed_up(tmp_path, capsys):
    """Gate, up and down of each expert may have bits of their own."""
    tensors = experts(
        "model.layers.0", 8, bits=lambda expert, at: 3 + (expert + at) % 4
    )
    config = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "n_routed_experts": 8}
    write_folder(tmp_path, tensors, config)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "  K3/4/5 x2, K4/5/6 x2, K5/6/3 x2, K6/3/4 x2  " in lines(capsys)[1]
    tensors = experts(
        "model.layers.0", 8, bits=lambda expert, at: 1 + (expert + at) % 8
    )
    write_folder(tmp_path, tensors, config)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "  K1 to K8 in 8 kinds x8  " in lines(capsys)[1]


def test_cuts_inside_blocks_are_told(tmp_path, capsys):
    name = "model.layers.0.self_attn.k_proj"
    config = {"num_hidden_layers": 1, "num_attention_heads": 12}
    write_folder(tmp_path, linear(name, 256, 384), config)
    assert cli.main(["inspect", str(tmp_path), "--tp", "4"]) == 0
    (line,) = [line for line in lines(capsys) if line.startswith("  4 cuts")]
    assert f"{name}: 384 out-features; between blocks at [1, 3]" in line
    assert cli.main(["inspect", str(tmp_path), "--tp", "12"]) == 0
    assert "\n  12 cuts 1 linear" in "\n".join(lines(capsys))


@pytest.mark.parametrize(
    ("options", "config", "says"),
    [
        (["--tp", "4"], {}, "2 slices of 128 intermediate features"),
        (["--tp", "3"], {}, "3 ranks do not divide num_attention_heads 8"),
        ([], {"n_routed_experts_per_layer": [0, 5]}, "gives layer 1 a width of 5"),
        ([], {"hybrid_tr3_tail": {}}, "hybrid_tr3_tail has no format"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_1(pack, capsys, options, config, says):
    (pack / "config.json").write_text(json.dumps(CONFIG | config))
    assert cli.main(["inspect", str(pack), *options]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("exl3: ") and err.count("\n") == 1
    assert says in err


def test_independent_problems_are_all_told(pack, capsys):
    """A contradiction in one layer hides none in another, nor one in the config."""
    tensors = dense("model.embed_tokens", 256, 500) | linear("lm_head", 256, 512, 6)
    tensors |= experts("model.layers.1", 4, ranks=2, bits=4)  # the config says 3
    del tensors["model.layers.1.mlp.experts.3.up_proj.rank1.suh"]
    tensors |= linear("model.layers.0.mlp.down_proj", 256, 256)
    del tensors["model.layers.0.mlp.down_proj.svh"]
    tensors |= experts("model.layers.2", 5)
    del tensors["model.layers.2.mlp.experts.0.up_proj.trellis"]
    write_folder(pack, tensors, CONFIG | {"n_group": 3})
    (pack / "model.safetensors.index.json").unlink()
    for file in pack.glob("model-*"):
        file.unlink()
    assert cli.main(["inspect", str(pack), "--tp", "3"]) == 1
    out, err = capsys.readouterr()
    assert not out
    told = err.splitlines()
    for says in (
        "down_proj: the trellis is stored, but neither svh nor sv",
        "experts.3.up_proj.rank1: the trellis is stored, but neither suh nor su",
        "0.up_proj.suh is stored in model.safetensors, but no trellis",
        "layer 1 has 4 routed experts, which n_group 3 does not divide",
        "3 ranks do not divide num_attention_heads 8",
    ):
        assert sum(says in line for line in told) == 1, (says, told)
    assert len(told) == 5
    # The first is the one with which a server refuses it.
    with pytest.raises(CheckpointError) as error:
        read_plan(pack, CONFIG | {"n_group": 3})
    assert told[0] == f"exl3: {error.value}"


def test_damaged_files_are_all_told_and_nothing_that_follows(pack, capsys):
    for file in pack.glob("*.safetensors"):
        file.write_bytes(b"")
    (pack / "config.json").write_text(json.dumps(CONFIG | {"hybrid_tr3_tail": {}}))
    assert cli.main(["inspect", str(pack), "--json"]) == 1
    out, err = capsys.readouterr()
    problems = json.loads(out)["problems"]
    assert [line[: line.index(":")] for line in problems] == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert err.splitlines() == [f"exl3: {line}" for line in problems]


def test_one_cause_does_not_fill_the_screen(tmp_path, capsys):
    tensors = {}
    for layer in range(30):
        tensors |= linear(f"model.layers.{layer}.self_attn.o_proj", 256, 256)
        del tensors[f"model.layers.{layer}.self_attn.o_proj.suh"]
    write_folder(tmp_path, tensors, {"num_hidden_layers": 30})
    assert cli.main(["inspect", str(tmp_path)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 21 and told[-1] == "exl3: and 10 more problems"


@pytest.mark.parametrize(
    "path", ["", "a", "no/such/folder", "x" * 5000, "a/b@\n", "../x"]
)
def test_what_is_no_folder_and_no_id_is_refused(path, capsys):
    assert cli.main(["inspect", path]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "no such folder, and no id on the hub" in err


@pytest.mark.parametrize("name", ["demo-glm-dsa-exl3", "demo-glm-dsa-ragged"])
def test_the_demo_models_take_no_second(name):
    folder = Path(__file__).parents[2] / "examples" / name
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "exl3.cli", "inspect", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of a core, since others may use this one; about 0.2 s.
    assert end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime < 1


@pytest.mark.parametrize("content", [None, "[]", "{", "\xff"])
def test_without_a_config_there_is_a_line_too(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_loads_no_torch(pack):
    code = (
        "import sys; from exl3.cli import main; "
        f"code = main(['inspect', {str(pack)!r}]); "
        "late = {'torch', 'numpy', 'huggingface_hub', 'matplotlib'}; "
        "sys.exit(code or not late.isdisjoint(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lm_head" not in done.stdout


def test_a_file_in_place_of_a_folder_is_told(tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    file.touch()
    assert cli.main(["inspect", str(file)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(file) in err


def test_a_reader_that_stops_is_no_error(pack):
    command = f"{sys.executable} -m exl3.cli inspect {pack} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
