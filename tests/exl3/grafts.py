# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Checkpoints to graft onto and from, and the command."""

import json
from pathlib import Path

from safetensors.torch import load_file

from exl3.cli import main
from tests.checkpoints import write_checkpoint
from tests.packs import Format, write_pack

SMALL = {"layers": 2, "experts": 4}
DRAFT = "model.layers.2."
EXPERTS = "model.layers.2.mlp.experts"

BASES = {
    "dense": lambda path: write_checkpoint(path, **SMALL),
    "dense, 3 files": lambda path: write_checkpoint(path, shards=3, **SMALL),
    "plain": lambda path: write_pack(path, draft=(), shards=2, **SMALL).path,
    "sliced": lambda path: write_pack(path, draft=(), ranks=2, **SMALL).path,
    "sliced, mixed": lambda path: (
        write_pack(
            path, draft=(), ranks=2, formats=[Format(3), Format(4)], **SMALL
        ).path
    ),
}
OVERLAYS = {
    "plain": lambda path: write_pack(path, shards=2, **SMALL).path,
    "sliced": lambda path: write_pack(path, ranks=2, **SMALL).path,
    "sliced, mixed": lambda path: (
        write_pack(path, ranks=2, formats=[Format(5), Format(3)], **SMALL).path
    ),
}


class Stored:
    """One checkpoint of each kind, made when it is first asked for, not to be changed.

    Args:
        folder: Where they are made.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._made: dict[tuple[str, str], Path] = {}

    def base(self, kind: str) -> Path:
        return self._get("base", kind)

    def overlay(self, kind: str) -> Path:
        return self._get("overlay", kind)

    def _get(self, side: str, kind: str) -> Path:
        if (side, kind) not in self._made:
            make = (BASES if side == "base" else OVERLAYS)[kind]
            self._made[side, kind] = make(self.folder / f"{side}-{len(self._made)}")
        return self._made[side, kind]


def graft(*arguments):
    return main(["graft-mtp", *map(str, arguments)])


def refused(capsys, *arguments):
    """The line with which a graft is refused."""
    capsys.readouterr()
    assert graft(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("exl3: ")
    assert error.count("\n") == 1
    return error


def tensors(folder):
    """The tensors that the index names; without one, all."""
    index = folder / "model.safetensors.index.json"
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: (file.name, tensor) for name, tensor in load_file(file).items()}
    if not index.exists():
        return {name: tensor for name, (_, tensor) in found.items()}
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(weight_map.values())}
    return {name: files[file][name] for name, file in weight_map.items()}
