# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Each command takes what the one before it made: a tiny model, and no engine."""

import json

import pytest

from exl3 import cli
from tests.checkpoints import write_checkpoint

TEXT = "In the beginning were the words of a text that nobody has to understand. " * 60


@pytest.fixture
def exl3(capsys):
    """Runs a command; returns what it prints."""

    def run(*arguments):
        code = cli.main(list(map(str, arguments)))
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return run


def test_from_a_checkpoint_to_a_compared_pack(exl3, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    source = tmp_path / "source"
    write_checkpoint(source, model_type="glm_moe_dsa", layers=2, experts=4, hidden=128)
    pruned, pack, draft = (tmp_path / name for name in ("pruned", "pack", "draft"))

    def inspect(*arguments):
        return json.loads(exl3("inspect", *arguments, "--json"))

    exl3("prune", source, pruned, "--widths", 3, "--text", text, "--tokens", 512)
    assert inspect(pruned)["expert_widths"] == [0, 3, 4]

    sliced = ["--rank-sliced", "--tp", 2, "--bits", 3]
    exl3("quantize", pruned, pack, *sliced, "--mtp-bits", 16)
    assert inspect(pack, "--tp", 2)["draft"] == "dense"

    exl3("quantize", pruned, draft, *sliced, "--mtp-bits", 2)
    exl3("graft-mtp", pack, draft)
    report = inspect(pack, "--tp", 2)
    assert report["draft"] == "exl3"
    assert report["expert_widths"] == [0, 3, 4]
    bits = [layer["experts"] for layer in report["layers"]]
    assert bits == [{}, {"3": 3}, {"2": 4}, {}]

    measured = json.loads(exl3("compare", pruned, pack, "--text", text, "--json"))
    # The experts of random layers hardly matter, so little is lost at 3 bits.
    assert 0 < measured["kl"]["mean"] < 1
    ratio = measured["b"]["bits_per_byte"] / measured["a"]["bits_per_byte"]
    assert 0.9 < ratio < 1.1
