# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""An id on the hub works as a folder does, and no weight of it is fetched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from exl3 import cli
from exl3.checkpoint import hub as reader
from tests import plans
from tests.header_files import (
    INDEX_FILE,
    dense,
    experts,
    header_of,
    linear,
    tail,
    write_file,
    write_folder,
)
from tests.hub import Hub

CONFIG = {
    **plans.CONFIG,
    "num_nextn_predict_layers": 0,
    "hybrid_tr3_tail": tail(
        2, (1, 1), 4, bits="mixed", k_values=[3], bits_per_expert="bits.json:k"
    ),
}
REPO = "org/my.pack-3bpw"


@pytest.fixture
def pack(tmp_path):
    """60 MB of weights behind a few kilobytes of headers."""
    tensors = dense("model.embed_tokens", 256, 500) | linear("lm_head", 256, 512, 6)
    tensors |= experts("model.layers.1", 4, ranks=2, bits=3)
    tensors |= dense("model.layers.0.mlp.down_proj", 12288, 2560)
    folder = write_folder(tmp_path / "pack", tensors, CONFIG, shards=3)
    (folder / "bits.json").write_text(json.dumps({"1": {"k": [3] * 4}}))
    (folder / "tokenizer.json").write_text(" " * 5_000_000)
    (folder / "README.md").write_text("#" * 1000)
    return folder


def point_to(monkeypatch, url):
    """What HF_ENDPOINT does when huggingface_hub is imported."""
    files = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(pack, monkeypatch):
    with Hub({REPO: pack}) as hub:
        point_to(monkeypatch, hub.url)
        yield hub


def report(path, capsys):
    assert cli.main(["inspect", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert not err
    return {name: value for name, value in json.loads(out).items() if name != "path"}


def refusal(path, capsys):
    assert cli.main(["inspect", path]) == 1
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    return err


def test_the_answer_is_the_folders(pack, hub, capsys):
    of_folder = report(pack, capsys)
    assert report(REPO, capsys) == report(f"{REPO}@v1", capsys) == of_folder
    assert of_folder["is_exl3"] and of_folder["dense_bytes"] > 60e6


def test_only_headers_and_json_files_are_sent(pack, hub, capsys):
    report(REPO, capsys)
    files = [file for file in pack.iterdir() if file.suffix == ".safetensors"]
    most = len(files) * reader._FIRST_BYTES
    for name in ("config.json", "bits.json", INDEX_FILE):
        most += (pack / name).stat().st_size
    assert 0 < hub.sent <= most < 500_000
    asked = [line.partition(" ")[0].rpartition("/")[2] for line in hub.requests[1:]]
    assert sorted(asked) == sorted(
        ["config.json", "bits.json", INDEX_FILE, *(file.name for file in files)]
    )


def test_a_long_header_is_sent_whole(tmp_path, hub, pack, capsys):
    tensors = {f"x.{at:06}.weight": ("BF16", (8,)) for at in range(9000)}
    write_file(pack / "model.safetensors", *header_of(tensors))
    for name in (*pack.glob("model-*"), pack / INDEX_FILE):
        name.unlink()
    (pack / "config.json").write_text('{"num_hidden_layers": 1}')
    assert report(REPO, capsys)["tensors"] == 9000
    ranges = [line.partition("bytes=")[2] for line in hub.requests if "tensors" in line]
    assert len(ranges) == 2 and ranges[1].startswith(f"{reader._FIRST_BYTES}-")


def test_a_hub_without_ranges_is_read_no_further_than_needed(pack, capsys, monkeypatch):
    with Hub({REPO: pack}, ranges=False) as hub:
        point_to(monkeypatch, hub.url)
        report(REPO, capsys)
    # What lies in sockets' buffers counts as sent.
    assert hub.sent < 30e6


def test_the_endpoint_is_the_environments(pack):
    with Hub({REPO: pack}) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-m", "exl3.cli", "inspect", REPO],
            env=environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert "K3 x4" in done.stdout
    assert hub.requests


def test_what_cannot_be_read_is_one_line(hub, capsys, monkeypatch):
    assert "there is no such model, or it is private" in refusal("org/none", capsys)
    assert "it has no revision v7" in refusal(f"{REPO}@v7", capsys)
    assert "no such folder" in refusal(f"{REPO}/x/y", capsys)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal(REPO, capsys)
    point_to(monkeypatch, "http://127.0.0.1:9")
    line = refusal(REPO, capsys)
    assert REPO in line and "check the network, and HF_ENDPOINT" in line


def test_damage_is_told_as_of_a_folder(pack, hub, capsys):
    first = sorted(pack.glob("model-*"))[0]
    first.write_bytes(b"")
    assert f"{first.name}: header of 0 bytes in a file of 0" in refusal(REPO, capsys)
    first.write_bytes((10**9).to_bytes(8, "little") + b"{}")
    assert f"{first.name}: header of 1000000000 bytes" in refusal(REPO, capsys)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ({"rfilename": "x.json", "size": 10**12}, "expected a JSON file of at most"),
        ({"rfilename": "x.safetensors"}, "the hub gives x.safetensors no size"),
        ({"rfilename": "x.safetensors", "size": -1}, "gives x.safetensors no size"),
        ({"rfilename": "x.json", "size": 99}, "x.json"),  # it is not there
    ],
)
def test_a_hostile_listing_is_refused(hub, capsys, file, says):
    hub.extra_files.append(file)
    assert says in refusal(REPO, capsys)


def test_a_listing_names_no_place_outside_its_folder(hub, capsys, tmp_path):
    for name in (
        "../evil.json",
        "/evil.json",
        "evil/b.safetensors",
        "..\\evil.json",
        "\n.json",
    ):
        hub.extra_files.append({"rfilename": name, "size": 5})
    report(REPO, capsys)
    assert not [line for line in hub.requests if "evil" in line]


def test_so_many_files_or_bytes_are_too_many(hub, capsys, monkeypatch):
    monkeypatch.setattr(reader, "MAX_FILES", 3)
    assert "has more than 3 files" in refusal(REPO, capsys)
    monkeypatch.setattr(reader, "MAX_FILES", 100)
    monkeypatch.setattr(reader, "MAX_TOTAL_BYTES", 1000)
    assert "has more than 1000 bytes of headers" in refusal(REPO, capsys)


def test_nothing_is_left_behind(hub, capsys, monkeypatch, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    report(REPO, capsys)
    refusal("org/none", capsys)
    assert list(temporary.iterdir()) == []


def test_the_files_are_sparse(hub, tmp_path):
    reader.fetch_headers(REPO, None, tmp_path)
    files: list[Path] = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) > 60e6
    assert sum(512 * file.stat().st_blocks for file in files) < 1e6
