# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 inspect` prints the plan, or one line that says why there is none."""

import json
import subprocess
import sys

import pytest

from exl3 import cli
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
        ["0", "-", "-", "K5 x1", "mul1", "-"],
        ["1", "4", "K3 x4", "-", "mcg", "2 slices"],
        ["2 draft", "2", "BF16 x2", "-", "-", "whole"],
        ["other", "-", "-", "K6 x1", "mcg", "-"],
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
        "sys.exit(code or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lm_head" not in done.stdout


def test_a_reader_that_stops_is_no_error(pack):
    command = f"{sys.executable} -m exl3.cli inspect {pack} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
