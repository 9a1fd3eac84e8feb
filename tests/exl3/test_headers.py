# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Headers are read exactly, and hostile ones are refused before they cost anything."""

import json
import os
import subprocess
import sys

import pytest

from exl3.checkpoint.file_header import TensorHeader, read_header
from exl3.checkpoint.headers import INDEX_FILE, fingerprint, list_folder, read_folder
from exl3.format.errors import CheckpointError
from tests.header_files import write_file, write_folder


def entry(shape, dtype="BF16", offsets=(0, 2)):
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


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
        (b'{"x": {}, "x": {}}', None, "'x' is there twice"),
        ({"x": entry([1, -2])}, None, "shape"),
        ({"x": entry([True])}, None, "shape"),
        ({"x": entry([2**60])}, None, "shape"),
        ({"x": entry([1] * 9)}, None, "shape"),
        ({"x": entry("3")}, None, "shape"),
        ({"x": entry([[1]])}, None, "shape"),
        ({"x": entry([1], dtype=["BF16"])}, None, "dtype"),
        ({"x": 3}, None, "shape"),
        ({"x": {"dtype": "BF16", "shape": [1]}}, None, "data_offsets"),
        ({"x": entry([1], offsets=(0, 2, 3))}, None, "data_offsets"),
        ({"x": entry([1], offsets=(0, True))}, None, "data_offsets"),
        ({"x": entry([1], offsets=(2, 0))}, None, "data_offsets"),
        ({"x": entry([1], offsets=(-2, 0))}, None, "data_offsets"),
        ({"x": entry([1], offsets=(0, 4))}, None, "2 bytes, but its data_offsets"),
        ({"x": entry([2**40, 2**40])}, None, "bytes, but its data_offsets"),
        ({"x": entry([1], offsets=(2, 4))}, None, "end to end"),
        ({"x": entry([1]), "y": entry([1])}, None, "end to end"),
        ({"x": entry([1])}, None, "take 2 bytes, but the file has 0"),
        ({"x\ny": entry([1])}, None, "printable"),
        ({"__metadata__": 3}, None, "__metadata__ 3"),
        ({"__metadata__": {"a": 1}}, None, "from text to text"),
        ({"x" * 1001: entry([1])}, None, "printable"),
    ],
)
def test_damaged_header_is_refused_by_file(tmp_path, header, length, says):
    file = write_file(tmp_path / "bad.safetensors", header, length=length)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors") as refusal:
        list(read_header(file))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_tensors_may_be_empty_and_of_a_type_yet_unknown(tmp_path):
    header = {
        "b": entry([3], "NEW", (0, 7)),
        "a": entry([0, 4], offsets=(7, 7)),
        "c": entry([], "BOOL", (7, 8)),
    }
    file = write_file(tmp_path / "m.safetensors", header, 8)
    assert [header.shape for header in read_header(file)] == [(3,), (0, 4), ()]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is no file"):
        read_folder(tmp_path)


def test_short_file_is_refused(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"\x01")
    with pytest.raises(CheckpointError, match="file of 1"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b", "x\n", 7, None]
)
def test_index_must_stay_in_the_folder(tmp_path, name):
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(CheckpointError, match="not in the checkpoint's folder"):
        read_folder(tmp_path)


def test_missing_shard_is_named(tmp_path):
    for name in ("model-00002.safetensors", "x" * 5000):
        index = {"weight_map": {"t": name}}
        (tmp_path / INDEX_FILE).write_text(json.dumps(index))
        says = rf"{name[:8]}.*{name[-8:]}', which is missing"
        with pytest.raises(CheckpointError, match=says):
            read_folder(tmp_path)


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "never-fetched")
    for read in (read_folder, fingerprint):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: No such file"):
            read(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"weight_map": 3}', "\x00", "[" * 100_000),
        '{"weight_map": {"x\\ny": "model.safetensors"}}',
    ],
)
def test_damaged_index_is_refused(tmp_path, text):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        read_folder(tmp_path)


def test_a_fingerprint_tells_every_change_of_the_files(tmp_path):
    seen = {fingerprint(tmp_path)}
    file = write_file(tmp_path / "m.safetensors", {"x": entry([1])}, 2)
    seen.add(fingerprint(tmp_path))
    (tmp_path / "README.md").touch()
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "never-fetched")
    assert fingerprint(tmp_path) in seen
    write_file(file, {"x": entry([22])}, 44)
    seen.add(fingerprint(tmp_path))
    (tmp_path / INDEX_FILE).write_text("{}")
    seen.add(fingerprint(tmp_path))
    os.utime(file, ns=(1, 1))
    seen.add(fingerprint(tmp_path))
    file.unlink()
    seen.add(fingerprint(tmp_path))
    assert len(seen) == 6


def test_the_index_decides_which_files_count(tmp_path):
    write_file(tmp_path / "a.safetensors", {"x": entry([1])}, 2)
    write_file(tmp_path / "stale.safetensors", {"y": entry([1])}, 2)
    index = {"weight_map": {"x": "a.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    assert [header.name for header in read_folder(tmp_path)] == ["x"]


X, Y = ("BF16", (1,)), ("BF16", (2,))


def test_a_tensor_that_the_index_has_and_its_shard_lacks_is_listed(tmp_path):
    write_folder(tmp_path, {"a": X, "b": X, "c": Y, "d": Y}, shards=2)
    write_file(tmp_path / "model-00002-of-00002.safetensors", {})
    listing = list_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"00002\.saf.* lacks 2 .*: b, d;"):
        listing.check()


@pytest.mark.parametrize("lost", [1, 2])
def test_without_an_index_names_tell_that_files_are_missing(tmp_path, lost):
    write_folder(tmp_path, {"a": X, "b": X, "c": X}, shards=3)
    (tmp_path / INDEX_FILE).unlink()
    list_folder(tmp_path).check()
    for shard in range(lost):
        (tmp_path / f"model-{shard + 1:05}-of-00003.safetensors").unlink()
    says = rf"-of-00003\.safetensors: .* folder has {3 - lost} of them"
    with pytest.raises(CheckpointError, match=says):
        list_folder(tmp_path).check()


def test_the_index_names_files_that_loaders_look_for(tmp_path):
    write_file(tmp_path / "model.bin", {"a": entry([1])}, 2)
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "model.bin"}}')
    with pytest.raises(CheckpointError, match=r"'model\.bin', whose name does not end"):
        list_folder(tmp_path)


def test_an_index_that_cannot_be_read_is_no_missing_one(tmp_path):
    write_file(tmp_path / "model.safetensors", {"a": entry([1])}, 2)
    (tmp_path / INDEX_FILE).symlink_to(tmp_path / "never-fetched")
    with pytest.raises(CheckpointError, match=rf"{INDEX_FILE}: No such file"):
        list_folder(tmp_path)
    (tmp_path / INDEX_FILE).unlink()
    (tmp_path / INDEX_FILE).mkdir()
    with pytest.raises(CheckpointError, match=rf"{INDEX_FILE}: is no file"):
        list_folder(tmp_path)


def test_a_shard_that_the_index_leaves_out_is_named(tmp_path):
    write_folder(tmp_path, {"a": X, "b": X}, shards=2)
    write_file(tmp_path / "mtp.safetensors", {"c": entry([1])}, 2)
    with pytest.raises(CheckpointError, match=r"does not list mtp\.safetensors"):
        list_folder(tmp_path).check()


def test_a_tensor_that_the_index_leaves_out_is_named(tmp_path):
    write_folder(tmp_path, {"a": X, "b": X, "c": X}, shards=3)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    del index["weight_map"]["b"]
    index["weight_map"]["d"] = "model-00002-of-00003.safetensors"
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    listing = list_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"00002-of-00003.* does not place.*: b;"):
        listing.check_unlisted(lambda name: False)
    listing.check_unlisted(lambda name: name == "b")


def test_a_tensor_in_two_files_is_named(tmp_path):
    for file in ("one", "two"):
        write_file(tmp_path / f"{file}.safetensors", {"x": entry([1])}, 2)
    with pytest.raises(CheckpointError, match=r"two\.saf.*: x is stored in one\.saf"):
        list_folder(tmp_path).check()


def test_shards_may_be_links_as_the_hubs_cache_has_them(tmp_path):
    folder = write_folder(tmp_path / "blobs", {"a": X, "b": X}, shards=2)
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for file in folder.iterdir():
        (cache / file.name).symlink_to(file)
    listing = list_folder(cache)
    listing.check()
    assert [header.name for header in listing.headers] == ["a", "b"]


def test_the_index_has_no_key_twice(tmp_path):
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "f", "a": "g"}}')
    with pytest.raises(CheckpointError, match="'a' is there twice"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "module", ["exl3", "exl3.format.tail", "exl3.checkpoint.plan", "exl3.cli"]
)
def test_importing_the_library_loads_no_torch(module):
    code = (
        f"import sys, {module}; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
