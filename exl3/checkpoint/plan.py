# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The plan of a checkpoint: how every module is stored, told from headers alone.

The server, the tools and `exl3 inspect` all ask it. Nobody downstream parses a tensor's
name or a field of the metadata again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exl3.checkpoint.agreement import check_agreement, decoder_layers
from exl3.checkpoint.experts import Encoding, ExpertLayer, read_expert_layer
from exl3.checkpoint.headers import list_folder
from exl3.checkpoint.matrix import Matrix, MatrixReader
from exl3.checkpoint.metadata import Metadata, add_files, read_metadata
from exl3.checkpoint.modules import (
    Fields,
    Modules,
    check_modules,
    group_by_module,
    sort_modules,
)
from exl3.checkpoint.stored_widths import StoredWidths, widths_of_modules
from exl3.format.errors import MetadataError
from exl3.format.names import layer_of, parse_name

__all__ = [
    "Checkpoint",
    "CheckpointPlan",
    "Encoding",
    "ExpertLayer",
    "Matrix",
    "read_checkpoint",
    "read_plan",
]

#: A layer's experts in one tensor, as some dense checkpoints have them.
_STACKS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class CheckpointPlan:
    """How every EXL3 module of a checkpoint is stored. Other modules are dense.

    Names are the checkpoint's: `model.layers.3.self_attn.q_proj`, and
    `model.layers.3.mlp.experts` for the routed experts of a layer.
    """

    linears: Mapping[str, Matrix] = field(default_factory=dict)
    experts: Mapping[str, ExpertLayer] = field(default_factory=dict)
    draft: str | None = None  # "exl3" or "dense": how the MTP layers are stored
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
        if last in _STACKS:
            return module in self.experts
        if last != "weight":
            return False
        if module in self.linears or module.rpartition(".")[0] in self.experts:
            return True
        match = parse_name(name)
        return match is not None and match["experts"] in self.experts


@dataclass(frozen=True)
class Checkpoint:
    """All that is read of a checkpoint before its weights."""

    plan: CheckpointPlan
    widths: StoredWidths  # what the tensors say of each layer's routed experts
    dense_bytes: Mapping[str, int]  # by module that is not EXL3


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
    text = text_config(config)
    metadata = read_metadata(folder, config)
    listing = list_folder(folder)
    grouped = group_by_module(listing.headers)
    is_exl3 = any("trellis" in fields for fields in grouped.values())
    if metadata.declared and not is_exl3:
        raise MetadataError(
            f"config.json: says that {folder} is EXL3, but none of its "
            f"{len(listing.headers)} tensors is a trellis; fetch the missing files, or "
            "remove quantization_config and hybrid_tr3_tail"
        )
    plan = CheckpointPlan()
    if is_exl3:
        listing.check()
        add_files(metadata, folder)
        plan = _plan(grouped, metadata, text)
        listing.check_unlisted(plan.is_superseded)
    num_layers = decoder_layers(text)
    return Checkpoint(plan, widths_of_modules(grouped, num_layers), {})


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's config, within a multimodal one or by itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _plan(
    grouped: Mapping[str, Fields], metadata: Metadata, text: Mapping[str, Any]
) -> CheckpointPlan:
    modules = sort_modules(grouped)
    check_modules(modules)
    reader = MatrixReader()
    linears = {
        module: reader.read(module, fields)
        for module, fields in modules.linears.items()
    }
    experts = {
        name: read_expert_layer(name, slices, reader)
        for name, slices in modules.experts.items()
    }
    warnings = [*metadata.warnings, *_superseded(modules)]
    warnings += check_agreement(
        metadata, text, linears, experts, modules.dense_experts.keys()
    )
    num_layers = decoder_layers(text)
    names = (*linears, *experts)
    draft = "exl3" if any(_is_draft(name, num_layers) for name in names) else None
    if draft is None:
        names = (*modules.dense, *modules.dense_experts)
        draft = "dense" if any(_is_draft(name, num_layers) for name in names) else None
    return CheckpointPlan(linears, experts, draft, tuple(warnings))


def _is_draft(module: str, num_layers: int) -> bool:
    index = layer_of(module, num_layers)
    return index is not None and index >= num_layers


def _superseded(modules: Modules) -> list[str]:
    """Says how many dense weights are left beside the trellises that replace them."""
    layers = modules.experts.values()
    fields = [*modules.linears.values(), *[at.fields for it in layers for at in it]]
    weights = [of["weight"] for of in fields if "weight" in of]
    if not weights:
        return []
    warning = (
        f"{weights[0].file}: {weights[0].name} and {len(weights) - 1} more dense "
        "weights have an EXL3 matrix beside them, which takes their place; they are "
        "not loaded"
    )
    return [warning]
