# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A checkpoint's folder is there when it is whole, and a stopped run is finished."""

import json

import pytest
import torch
from safetensors.torch import load_file

from exl3.checkpoint.headers import list_folder
from exl3.tools.shared.errors import ToolError
from exl3.tools.shared.staging import StagedCheckpoint

REQUEST = {"command": "demo", "bits": 3}
TENSORS = {f"layer.{number}.weight": torch.full((8, 4), number) for number in range(5)}
ALL_FILES = ["config.json", "model.safetensors.index.json"] + [
    f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)
]


class Stopped(Exception):
    pass


def write(folder, stop=None, resume=False, request=REQUEST, tensors=TENSORS, **options):
    """Writes a step for each tensor; returns which were not done before."""
    done = []
    with StagedCheckpoint(folder, request, resume, **options) as out:
        for name, tensor in tensors.items():
            if name == stop:
                raise Stopped
            if not out.has(name):
                out.write_shard(name, {name: tensor}, note={"sum": int(tensor.sum())})
                done.append(name)
            assert out.note(name) == {"sum": int(tensor.sum())}
        out.write_json("config.json", {"model_type": "demo"})
    return done


def read(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_file_needs_no_index(tmp_path):
    with StagedCheckpoint(tmp_path / "out", REQUEST) as out:
        out.write_shard("all", TENSORS)
        out.write_json("config.json", {})
    assert sorted(files(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert read(tmp_path / "out").keys() == TENSORS.keys()


def test_steps_become_numbered_shards_with_an_index(tmp_path):
    folder = tmp_path / "out"
    write(folder)
    assert sorted(files(folder)) == sorted(ALL_FILES)
    found = list_folder(folder)
    assert (found.missing, found.unlisted, found.stray_files) == ((), (), ())
    for name, tensor in read(folder).items():
        assert torch.equal(tensor, TENSORS[name])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 8 * 4 * 8
    assert list(tmp_path.iterdir()) == [folder]


def test_a_step_of_many_bytes_is_split(tmp_path):
    folder = tmp_path / "out"
    with StagedCheckpoint(folder, REQUEST, shard_bytes=2 * 8 * 4 * 8) as out:
        out.write_shard("all", TENSORS)  # two of these int64 tensors fit
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert read(folder).keys() == TENSORS.keys()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(-877912083, dtype=torch.int32),  # no dimension, as a marker
        torch.randn(3, 5).bfloat16(),
        torch.randn(4, 4).to(torch.float8_e4m3fn),
        torch.randn(6, 4).T,  # not contiguous
        torch.zeros(0, 4),
        torch.tensor([True, False, True]),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_what_is_written_is_what_the_library_reads(tensor, tmp_path):
    with StagedCheckpoint(tmp_path / "out", REQUEST) as out:
        out.write_shard("all", {"odd": torch.ones(3, dtype=torch.int8), "it": tensor})
    found = read(tmp_path / "out")["it"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.float(), tensor.float())


@pytest.mark.parametrize("stop", [*list(TENSORS)[1:], None])
def test_a_stopped_run_is_finished_by_another(stop, tmp_path):
    write(tmp_path / "whole")
    folder = tmp_path / "out"
    if stop is not None:
        with pytest.raises(Stopped):
            write(folder, stop)
        assert not folder.exists()
    steps = list(TENSORS)
    left = steps[steps.index(stop) :] if stop else steps
    assert write(folder, resume=True) == left
    assert files(folder) == files(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists()


def test_what_failed_before_its_first_step_leaves_nothing(tmp_path):
    with pytest.raises(Stopped):
        write(tmp_path / "out", stop=next(iter(TENSORS)))
    assert list(tmp_path.iterdir()) == []


def test_a_state_goes_from_run_to_run_and_not_into_the_checkpoint(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(Stopped), StagedCheckpoint(folder, REQUEST) as out:
        assert out.read_state() is None
        out.record("first", state={"hidden": torch.zeros(2)})
        out.write_shard("second", TENSORS, state={"hidden": torch.ones(2)})
        out.record("third")
        raise Stopped
    partial = tmp_path / ".out.partial"
    assert len(list(partial.glob("*.safetensors"))) == 1
    with StagedCheckpoint(folder, REQUEST, resume=True) as out:
        assert torch.equal(out.read_state()["hidden"], torch.ones(2))
        assert all(map(out.has, ["first", "second", "third"]))
    assert list(files(folder)) == ["model.safetensors"]


def test_a_run_stopped_just_before_or_after_the_last_rename_is_finished(tmp_path):
    folder, partial = tmp_path / "out", tmp_path / ".out.partial"
    write(tmp_path / "whole")
    for after in False, True:
        with pytest.raises(Stopped):
            write(folder, stop=list(TENSORS)[-1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagedCheckpoint, "_leave", lambda self: None)
            if not after:
                rename = type(folder).rename

                def stop_at_last(self, target, rename=rename):
                    if target == folder:
                        raise Stopped
                    rename(self, target)

                patch.setattr(type(folder), "rename", stop_at_last)
                with pytest.raises(Stopped):
                    write(folder, resume=True)
            else:
                write(folder, resume=True)
        assert partial.is_dir()
        assert folder.exists() == after
        assert write(folder, resume=True) == []
        assert files(folder) == files(tmp_path / "whole")
        assert not partial.exists()
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_resume_without_a_stopped_run_starts_anew(tmp_path):
    assert write(tmp_path / "out", resume=True) == list(TENSORS)


def test_a_stopped_run_is_not_overwritten(tmp_path):
    with pytest.raises(Stopped):
        write(tmp_path / "out", stop="layer.3.weight")
    with pytest.raises(ToolError, match=r"\.out\.partial: .*add --resume .*delete it"):
        write(tmp_path / "out")
    assert write(tmp_path / "out", resume=True) == ["layer.3.weight", "layer.4.weight"]


def test_resume_is_for_the_same_request(tmp_path):
    with pytest.raises(Stopped):
        write(tmp_path / "out", stop="layer.3.weight")
    with pytest.raises(ToolError, match="other bits: 3 then, 4 now"):
        write(tmp_path / "out", resume=True, request={**REQUEST, "bits": 4})
    with pytest.raises(ToolError, match="other seed: None then, 1 now"):
        write(tmp_path / "out", resume=True, request={**REQUEST, "seed": 1})
    assert write(tmp_path / "out", resume=True) == ["layer.3.weight", "layer.4.weight"]


def test_resume_is_for_the_same_source(tmp_path):
    source = tmp_path / "source"
    write(source)
    with pytest.raises(Stopped):
        write(tmp_path / "out", stop="layer.3.weight", sources=[source])
    (source / "config.json").write_text("{}")
    with pytest.raises(ToolError, match="other source files; run --resume"):
        write(tmp_path / "out", resume=True, sources=[source])


def test_a_file_of_a_step_that_is_gone_is_named(tmp_path):
    with pytest.raises(Stopped):
        write(tmp_path / "out", stop="layer.3.weight")
    (tmp_path / ".out.partial/checkpoint/layer.1.weight.0.safetensors").unlink()
    with pytest.raises(ToolError, match=r"layer\.1\.weight\.0\.safetensors: is gone"):
        write(tmp_path / "out", resume=True)


def test_two_runs_do_not_write_one_folder(tmp_path):
    with StagedCheckpoint(tmp_path / "out", REQUEST) as out:
        out.write_shard("all", TENSORS)
        with pytest.raises(ToolError, match="another run is writing it"):
            write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").is_dir()


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "link").symlink_to("link")
    for place in folder, tmp_path / "link":
        for resume in False, True:
            with pytest.raises(ToolError, match="is there already; name another"):
                write(place, resume=resume)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


def test_a_source_is_not_written_to(tmp_path):
    source = tmp_path / "source"
    write(source)
    (tmp_path / "link").symlink_to("source")
    with pytest.raises(ToolError, match="source: is the source itself"):
        write(source, sources=[source])
    with pytest.raises(ToolError, match="new: is inside"):
        write(tmp_path / "link" / "new", sources=[source])
    assert sorted(files(source)) == sorted(ALL_FILES)


def test_a_tensor_is_added_once_also_over_runs(tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(Stopped):
        write(folder, stop="layer.3.weight")
    with (
        pytest.raises(ValueError, match=r"^layer\.1\.weight: added by layer\.1\."),
        StagedCheckpoint(folder, REQUEST, resume=True) as out,
    ):
        out.write_shard("again", {"layer.1.weight": torch.zeros(1)})
