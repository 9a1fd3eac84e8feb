# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A checkpoint's folder is there when it is whole, and not before."""

import json

import pytest
import torch
from safetensors.torch import load_file

from exl3.checkpoint.headers import list_folder
from exl3.tools.writer import CheckpointWriter

TENSORS = {f"layer.{number}.weight": torch.full((8, 4), number) for number in range(5)}


def write(folder, **options):
    with CheckpointWriter(folder, **options) as writer:
        for name, tensor in TENSORS.items():
            writer.add(name, tensor)
        writer.write_json("config.json", {"model_type": "demo"})


def read(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def test_one_file_needs_no_index(tmp_path):
    write(tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors"]
    assert read(tmp_path / "out").keys() == TENSORS.keys()


def test_shards_are_numbered_and_indexed(tmp_path):
    folder = tmp_path / "out"
    write(folder, shard_bytes=2 * 8 * 4 * 8)  # two int64 tensors
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    found = list_folder(folder)
    assert (found.missing, found.unlisted, found.stray_files) == ((), (), ())
    assert {header.name for header in found.headers} == TENSORS.keys()
    for name, tensor in read(folder).items():
        assert torch.equal(tensor, TENSORS[name])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 8 * 4 * 8


def test_nothing_is_there_after_a_failure_and_the_next_run_starts_anew(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(folder) as writer:
        writer.add("stale", torch.zeros(1))
        writer.write_json("stale.json", {})
        raise KeyboardInterrupt
    assert not folder.exists()
    write(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    with pytest.raises(FileExistsError, match="is there already; name another"):
        CheckpointWriter(tmp_path)


def test_a_tensor_is_added_once(tmp_path):
    with (
        pytest.raises(ValueError, match=r"^a.weight: added twice"),
        CheckpointWriter(tmp_path / "out", shard_bytes=1) as writer,
    ):
        writer.add("a.weight", torch.zeros(1))
        writer.add("a.weight", torch.zeros(1))
