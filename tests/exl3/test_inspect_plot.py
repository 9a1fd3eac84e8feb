# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 inspect --plot` draws every layer, or says why it cannot."""

import re
import sys

import matplotlib
import pytest

from exl3 import cli
from tests.header_files import dense, experts, linear, write_folder

CONFIG = {"num_hidden_layers": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
CONFIG |= {"num_nextn_predict_layers": 1, "n_routed_experts_per_layer": [0, 4, 6, 3, 5]}


@pytest.fixture
def pack(tmp_path):
    tensors = linear("model.layers.0.mlp.down_proj", 256, 256, 5)
    tensors |= experts("model.layers.1", 4, bits=2)
    tensors |= experts("model.layers.2", 6, bits=lambda expert, at: 3 + expert % 2)
    tensors |= experts("model.layers.3", 3, bits=lambda expert, at: 3 + at)
    tensors |= dense("model.layers.4.mlp.gate", 256, 5)
    for expert in range(5):
        module = f"model.layers.4.mlp.experts.{expert}"
        tensors |= dense(f"{module}.gate_proj", 256, 256)
    return write_folder(tmp_path / "a-pack", tensors, CONFIG)


def draw(pack, file):
    return cli.main(["inspect", str(pack), "--plot", str(file)])


def test_it_shows_widths_bits_and_the_draft(pack, tmp_path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert draw(pack, tmp_path / "plot.svg") == 0
    texts = re.findall(
        r"<text[^>]*>([^<]+)</text>", (tmp_path / "plot.svg").read_text()
    )
    for text in ("a-pack", "layer", "routed experts", "bits per weight"):
        assert text in texts
    legend = [text for text in texts if text in ("K2", "K3", "K4", "mixed", "BF16")]
    # As they are stacked, the last on top.
    assert legend == ["BF16", "mixed", "K4", "K3", "K2"]
    assert texts.count("MTP") == 2
    # 1 matrix of 5 bits, 4 experts of 2, 3 of 3, 3 of 4, and 3 of 3, 4 and 5.
    bits = 5 + 3 * 4 * 2 + 3 * 3 * 3 + 3 * 3 * 4 + 3 * (3 + 4 + 5)
    assert f"mean, {bits / (1 + 3 * (4 + 3 + 3 + 3)):.2f}" in texts


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_the_suffix_tells_the_format(pack, tmp_path, suffix):
    assert draw(pack, tmp_path / f"plot.{suffix}") == 0
    start = (tmp_path / f"plot.{suffix}").read_bytes()[:8]
    assert start.startswith({"png": b"\x89PNG", "pdf": b"%PDF"}[suffix])


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("plot.exe", "plot.exe: Format 'exe' is not supported"),
        ("no/such/folder/plot.png", "no/such/folder/plot.png"),
    ],
)
def test_what_cannot_be_written_is_one_line(pack, tmp_path, capsys, file, says):
    assert draw(pack, tmp_path / file) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and says in err


def test_without_matplotlib_the_line_says_how_to_get_it(pack, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw(pack, "plot.png") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install matplotlib" in err


def test_a_checkpoint_without_layers_has_no_plot(tmp_path, capsys):
    write_folder(tmp_path, dense("lm_head", 256, 256), {"num_hidden_layers": 0})
    assert draw(tmp_path, tmp_path / "plot.png") == 1
    assert "no layers to draw" in capsys.readouterr().err
