# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Writes a checkpoint's folder, whole or not at all."""

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from exl3.checkpoint.headers import INDEX_FILE

SINGLE_FILE = "model.safetensors"
SHARD_FILE = "model-{number:05d}-of-{count:05d}.safetensors"


class CheckpointWriter:
    """Collects tensors and files beside a folder's place; the end renames them there.

    A run that is interrupted leaves `.NAME.partial` beside the place, which the next
    run replaces.

        with CheckpointWriter(folder) as writer:
            writer.add("lm_head.weight", tensor)
            writer.write_json("config.json", config)

    Args:
        folder: The folder to make.
        shard_bytes: A safetensors file is closed when it holds this much.

    Raises:
        FileExistsError: The folder is there already.
    """

    def __init__(self, folder: Path, shard_bytes: int = 4 << 30):
        if folder.exists():
            raise FileExistsError(f"{folder}: is there already; name another folder")
        self.folder = folder
        self.partial = folder.parent / f".{folder.name}.partial"
        self._shard_bytes = shard_bytes
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> Self:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._close_shard()
            self._name_shards()
            self.partial.rename(self.folder)

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds one tensor.

        Raises:
            ValueError: The name was added before.
        """
        if name in self._open or any(name in shard for shard in self._shards):
            raise ValueError(f"{name}: added twice")
        self._open[name] = tensor.contiguous()
        self._open_bytes += tensor.nbytes
        if self._open_bytes >= self._shard_bytes:
            self._close_shard()

    def write_json(self, name: str, content: Any) -> None:
        """Writes a JSON file."""
        (self.partial / name).write_text(json.dumps(content, indent=2) + "\n")

    def copy(self, file: Path) -> None:
        """Copies a file under its own name."""
        shutil.copyfile(file, self.partial / file.name)

    def _close_shard(self) -> None:
        if not self._open:
            return
        path = self._shard_path(len(self._shards) + 1)
        save_file(self._open, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors lets only the owner read what it writes
        self._shards.append(list(self._open))
        self._total_bytes += self._open_bytes
        self._open, self._open_bytes = {}, 0

    def _shard_path(self, number: int) -> Path:
        """Where a shard lies until the number of shards is known."""
        return self.partial / f"shard-{number}"

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            self._shard_path(1).rename(self.partial / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            file = SHARD_FILE.format(number=number, count=count)
            self._shard_path(number).rename(self.partial / file)
            weight_map |= dict.fromkeys(names, file)
        metadata = {"total_size": self._total_bytes}
        self.write_json(INDEX_FILE, {"metadata": metadata, "weight_map": weight_map})
