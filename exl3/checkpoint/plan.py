# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The plan of a checkpoint: how every module is stored, told from headers alone.

The server, the tools and `exl3 inspect` all ask it. Nobody downstream parses a tensor's
name or a field of the metadata again.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exl3.checkpoint.agreement import check_agreement, decoder_layers
from exl3.checkpoint.experts import Encoding, ExpertLayer, read_expert_layer
from exl3.checkpoint.headers import list_folder
from exl3.checkpoint.json_files import read_json
from exl3.checkpoint.matrix import Matrix, MatrixReader
from exl3.checkpoint.metadata import Metadata, add_files, read_metadata
from exl3.checkpoint.modules import (
    Fields,
    Modules,
    check_layers_stored,
    check_modules,
    group_by_module,
    sort_modules,
)
from exl3.checkpoint.problems import Problems
from exl3.checkpoint.stored_widths import StoredWidths, widths_of_modules
from exl3.format.errors import FileError, MetadataError
from exl3.format.names import STACKS, layer_of, parse_name

__all__ = [
    "Checkpoint",
    "CheckpointPlan",
    "Encoding",
    "ExpertLayer",
    "Matrix",
    "Survey",
    "read_checkpoint",
    "read_config",
    "read_plan",
    "read_with_modules",
    "survey",
]


@dataclass(frozen=True)
class CheckpointPlan:
    """How every EXL3 module of a checkpoint is stored. Other modules are dense.

    Names are the checkpoint's: `model.layers.3.self_attn.q_proj`, and
    `model.layers.3.mlp.experts` for the routed experts of a layer.
    """

    linears: Mapping[str, Matrix] = field(default_factory=dict)
    experts: Mapping[str, ExpertLayer] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # one line each, to be logged

    @property
    def is_exl3(self) -> bool:
        """Whether anything in the checkpoint is EXL3."""
        return bool(self.linears or self.experts)

    def is_superseded(self, name: str) -> bool:
        """Whether a tensor is a dense weight that a trellis took the place of.

        Loaders read whole files, so such a tensor still arrives, and is to be dropped.
        """
        module, _, last = name.rpartition(".")
        if last in STACKS:
            return module in self.experts
        if last != "weight":
            return False
        if module in self.linears or module.rpartition(".")[0] in self.experts:
            return True
        match = parse_name(name)
        return match is not None and match["experts"] in self.experts


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint before its weights are read. It is small."""

    plan: CheckpointPlan
    widths: StoredWidths  # what the tensors say of each layer's routed experts


def read_plan(folder: Path, config: Mapping[str, Any]) -> CheckpointPlan:
    """How a checkpoint is stored; see `read_checkpoint`."""
    return read_checkpoint(folder, config).plan


def read_checkpoint(folder: Path, config: Mapping[str, Any]) -> Checkpoint:
    """Reads how a checkpoint is stored, once; no weight is read.

    Args:
        folder: The checkpoint's folder.
        config: Its `config.json`, as a plain dictionary.

    Raises:
        CheckpointError: The checkpoint contradicts itself or cannot be served.
    """
    return read_with_modules(folder, config)[0]


def read_with_modules(
    folder: Path, config: Mapping[str, Any]
) -> tuple[Checkpoint, Mapping[str, Fields]]:
    """The same, with every tensor by its module: 250 MB of a million tensors."""
    found = survey(folder, config, Problems())
    return found.checkpoint, found.tensors


@dataclass(frozen=True)
class Survey:
    """All that the headers say. It is large: a server keeps only `checkpoint`."""

    checkpoint: Checkpoint
    tensors: Mapping[str, Fields]  # every one, by its module
    modules: Modules


def survey(folder: Path, config: Mapping[str, Any], problems: Problems) -> Survey:
    """Reads how a checkpoint is stored.

    Args:
        folder: The checkpoint's folder.
        config: Its `config.json`, as a plain dictionary.
        problems: Takes note of what is wrong, or stops at the first.

    Raises:
        CheckpointError: The checkpoint contradicts itself or cannot be served.
    """
    with without_collection():
        metadata = Metadata()
        with problems.noted():
            metadata = read_metadata(folder, config)
        return _read(folder, metadata, text_config(config), problems)


def _read(
    folder: Path, metadata: Metadata, text: Mapping[str, Any], problems: Problems
) -> Survey:
    listing = list_folder(folder, problems)
    grouped = group_by_module(listing.headers)
    is_exl3 = any("trellis" in fields for fields in grouped.values())
    if is_exl3 or metadata.declared:
        listing.check(problems)
    problems.stop()
    num_layers = decoder_layers(text)
    # A draft in a folder of its own may be dense under the config of an EXL3 trunk.
    if metadata.declared and not is_exl3 and not _is_draft(grouped, num_layers):
        raise MetadataError(
            f"config.json: says that {folder} is EXL3, but none of its "
            f"{len(listing.headers)} tensors is a trellis; fetch the missing files, or "
            "remove quantization_config and hybrid_tr3_tail"
        )
    plan, modules = CheckpointPlan(), sort_modules(grouped)
    if is_exl3:
        with problems.noted():
            add_files(metadata, folder)
        plan = _plan(modules, metadata, text, problems)
        with problems.noted():
            check_layers_stored(modules, num_layers)
        with problems.noted():
            listing.check_unlisted(plan.is_superseded)
    checkpoint = Checkpoint(plan, widths_of_modules(grouped, num_layers))
    return Survey(checkpoint, grouped, modules)


def _is_draft(grouped: Mapping[str, Fields], num_layers: int) -> bool:
    """Whether these modules are draft layers and no decoder layer."""
    found = (layer_of(module, num_layers) for module in grouped)
    layers = [layer for layer in found if layer is not None]
    return bool(layers) and min(layers) >= num_layers


@contextmanager
def without_collection() -> Iterator[None]:
    """Puts off the search for reference cycles.

    None are made here, and among the objects of a million tensors the search takes
    longer than all the rest.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_config(folder: Path) -> Mapping[str, Any]:
    """A checkpoint's `config.json`.

    Raises:
        FileError: There is none, or it is no JSON object.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, Mapping):
        raise FileError(
            f"{folder / 'config.json'}: is not a JSON object; fetch it again"
        )
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's config, within a multimodal one or by itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _plan(
    modules: Modules,
    metadata: Metadata,
    text: Mapping[str, Any],
    problems: Problems,
) -> CheckpointPlan:
    with problems.noted():
        check_modules(modules)
    reader = MatrixReader()
    linears: dict[str, Matrix] = {}
    for module, fields in modules.linears.items():
        with problems.noted():
            linears[module] = reader.read(module, fields)
    experts: dict[str, ExpertLayer] = {}
    for name, slices in modules.experts.items():
        with problems.noted():
            experts[name] = read_expert_layer(name, slices, reader)
    warnings = [*metadata.warnings, *_superseded(modules)]
    warnings += check_agreement(
        metadata, text, linears, experts, modules.dense_experts.keys(), problems
    )
    return CheckpointPlan(linears, experts, tuple(warnings))


def _superseded(modules: Modules) -> list[str]:
    """Says how many dense weights are left beside the trellises that replace them."""
    layers = modules.experts.values()
    fields = [*modules.linears.values(), *[at.fields for it in layers for at in it]]
    weights = [of["weight"] for of in fields if "weight" in of]
    beside = [modules.dense.get(name, {}) for name in modules.experts]
    weights += [of[stack] for of in beside for stack in STACKS if stack in of]
    if not weights:
        return []
    warning = (
        f"{weights[0].file}: {weights[0].name} and {len(weights) - 1} more dense "
        "weights have an EXL3 matrix beside them, which takes their place; they are "
        "not loaded"
    )
    return [warning]
