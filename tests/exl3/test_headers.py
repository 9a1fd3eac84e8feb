# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Headers are read exactly, and hostile ones are refused before they cost anything."""

import json
import os
import struct
import sys
from pathlib import Path

import pytest

from exl3.checkpoint.errors import CheckpointError
from exl3.checkpoint.headers import (
    INDEX_FILE,
    TensorHeader,
    fingerprint,
    read_folder,
    read_header,
)


def write_file(path: Path, header: object, body: bytes = b"", length=None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + body)
    return path


def entry(shape, dtype="BF16"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}


def test_agrees_with_the_safetensors_library(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file(
        {"a": torch.zeros(3, 5), "b": torch.zeros((), dtype=torch.int32)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert sorted(read_folder(tmp_path), key=lambda header: header.name) == [
        TensorHeader("a", "F32", (3, 5), "model.safetensors"),
        TensorHeader("b", "I32", (), "model.safetensors"),
    ]


@pytest.mark.parametrize(
    ("header", "length", "says"),
    [
        (b"", 0, "not JSON"),
        (b"{}", 10**18, "truncated or damaged"),
        (b"{}", 3, "truncated or damaged"),
        (b"[" * 100_000, None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        ([1, 2], None, "not a JSON object"),
        ({"x": entry([1, -2])}, None, "shape"),
        ({"x": entry([True])}, None, "shape"),
        ({"x": entry([2**60])}, None, "shape"),
        ({"x": entry([1] * 9)}, None, "shape"),
        ({"x": entry("3")}, None, "shape"),
        ({"x": 3}, None, "shape"),
    ],
)
def test_damaged_header_is_refused_by_file(tmp_path, header, length, says):
    file = write_file(tmp_path / "bad.safetensors", header, length=length)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors") as refusal:
        list(read_header(file))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_short_file_is_refused(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"\x01")
    with pytest.raises(CheckpointError, match="file of 1"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", 7])
def test_index_must_stay_in_the_folder(tmp_path, name):
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(CheckpointError, match="not in the checkpoint's folder"):
        read_folder(tmp_path)


def test_missing_shard_is_named(tmp_path):
    index = {"weight_map": {"t": "model-00002.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00002\.safetensors, which"):
        read_folder(tmp_path)


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "never-fetched")
    for read in (read_folder, fingerprint):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: No such file"):
            read(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', "\x00", "[" * 100_000]
)
def test_damaged_index_is_refused(tmp_path, text):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        read_folder(tmp_path)


def test_a_fingerprint_tells_every_change_of_the_files(tmp_path):
    seen = {fingerprint(tmp_path)}
    file = write_file(tmp_path / "m.safetensors", {"x": entry([1])})
    seen.add(fingerprint(tmp_path))
    (tmp_path / "README.md").touch()
    assert fingerprint(tmp_path) in seen
    write_file(file, {"x": entry([22])})
    seen.add(fingerprint(tmp_path))
    (tmp_path / INDEX_FILE).write_text("{}")
    seen.add(fingerprint(tmp_path))
    os.utime(file, ns=(1, 1))
    seen.add(fingerprint(tmp_path))
    file.unlink()
    seen.add(fingerprint(tmp_path))
    assert len(seen) == 6


def test_the_index_decides_which_files_count(tmp_path):
    write_file(tmp_path / "a.safetensors", {"x": entry([1])})
    write_file(tmp_path / "stale.safetensors", {"y": entry([1])})
    index = {"weight_map": {"x": "a.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    assert [header.name for header in read_folder(tmp_path)] == ["x"]


def test_importing_the_library_loads_no_torch():
    import subprocess

    code = (
        "import sys, exl3, exl3.checkpoint.expert_widths; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
