# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Which tensors of an MTP layer go into a checkpoint, and which they replace."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3.checkpoint.agreement import decoder_layers
from exl3.checkpoint.experts import ExpertLayer
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.metadata import read_metadata
from exl3.checkpoint.modules import Fields
from exl3.checkpoint.plan import (
    CheckpointPlan,
    read_config,
    read_with_modules,
    text_config,
)
from exl3.checkpoint.stored_widths import StoredWidths
from exl3.format.constants import Codebook
from exl3.format.names import layer_of, parse_name
from exl3.format.tail import TAIL, Tail
from exl3.tools.shared.errors import ToolError

if TYPE_CHECKING:
    from torch import Tensor

#: Fields of a config that an MTP layer is built from.
_SHAPE_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "moe_intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
)


class Side:
    """One of the two checkpoints, read by its headers.

    Args:
        folder: Its folder.

    Raises:
        CheckpointError: It cannot be served.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_config(folder)
        self.text = text_config(self.config)
        self.num_layers = decoder_layers(self.text)
        checkpoint, self.modules = read_with_modules(folder, self.config)
        self.plan: CheckpointPlan = checkpoint.plan
        self.stored: StoredWidths = checkpoint.widths
        self.tail: Tail | None = read_metadata(folder, self.config).tail
        self.drafts: dict[str, Fields] = {
            module: fields
            for module, fields in self.modules.items()
            if (layer_of(module, self.num_layers) or 0) >= self.num_layers
        }
        self.draft_experts: dict[str, ExpertLayer] = {
            name: layer
            for name, layer in self.plan.experts.items()
            if self.layer_of(name) >= self.num_layers
        }
        self.draft_linears = {
            name: matrix
            for name, matrix in self.plan.linears.items()
            if name in self.drafts
        }

    def layer_of(self, module: str) -> int:
        """The global index of a module's layer; -1 if it is in none."""
        layer = layer_of(module, self.num_layers)
        return -1 if layer is None else layer

    @property
    def draft_layers(self) -> list[int]:
        """Global indices of the MTP layers that are stored."""
        return sorted({self.layer_of(module) for module in self.drafts})

    def slots(self) -> dict[str, list[TensorHeader]]:
        """The tensors of the MTP layers by what is exchanged as one.

        That is a module, or all routed experts of a layer. Weights that a trellis has
        superseded already are left out.
        """
        slots: dict[str, list[TensorHeader]] = {}
        for module, fields in self.drafts.items():
            headers = [
                header
                for header in fields.values()
                if not self.plan.is_superseded(header.name)
            ]
            if headers:
                slots.setdefault(_slot(module), []).extend(headers)
        return slots

    def read(self, header: TensorHeader) -> "Tensor":
        """One tensor."""
        from safetensors import safe_open

        with safe_open(self.folder / header.file, "pt") as file:
            return file.get_tensor(header.name)


def _slot(module: str) -> str:
    match = parse_name(f"{module}.weight")
    if match is None:
        return module
    return match["experts"] or match["module"]


@dataclass(frozen=True)
class Graft:
    """What goes into BASE and what leaves it.

    Attributes:
        added: Tensors of OVERLAY.
        dropped: Tensors of BASE that its index no longer names.
        rewritten: Files of BASE, each with the tensors that it is written anew
            without. Readers take all tensors of a file, so a tensor that is neither
            EXL3 nor superseded by EXL3 must not be in two files.
        widths: Routed experts of the MTP layers, by global index.
    """

    added: list[TensorHeader]
    dropped: list[TensorHeader]
    rewritten: Mapping[str, list[TensorHeader]]
    widths: Mapping[int, int]


def plan_graft(base: Side, overlay: Side) -> Graft:
    """Decides what is exchanged.

    Raises:
        ToolError: OVERLAY's MTP layer does not fit BASE, or there is none.
    """
    _check_fit(base, overlay)
    _check_slices(base, overlay)
    plan = CheckpointPlan(overlay.draft_linears, overlay.draft_experts)
    old = base.slots()
    added: list[TensorHeader] = []
    dropped: list[TensorHeader] = []
    for slot, headers in overlay.slots().items():
        is_exl3 = slot in plan.linears or slot in plan.experts
        if is_exl3 or not _same(base, old.get(slot, []), overlay, headers):
            added += headers
            dropped += old.get(slot, [])
    rewritten: dict[str, list[TensorHeader]] = {
        header.file: [] for header in dropped if not plan.is_superseded(header.name)
    }
    for header in dropped:
        if header.file in rewritten:
            rewritten[header.file].append(header)
    widths = {
        layer: gate.shape[0]
        for layer, gate in overlay.stored.gates.items()
        if layer >= overlay.num_layers
    }
    for name, experts in overlay.draft_experts.items():
        widths[overlay.layer_of(name)] = experts.width
    return Graft(added, dropped, rewritten, widths)


def _check_fit(base: Side, overlay: Side) -> None:
    def refuse(what: str) -> ToolError:
        return ToolError(
            f"{overlay.folder}: {what}; an MTP layer fits only the model that it was "
            "made for"
        )

    if not overlay.draft_experts and not overlay.draft_linears:
        stored = "is dense" if overlay.drafts else "is not there"
        raise ToolError(
            f"{overlay.folder}: has no EXL3 MTP layer: layer {overlay.num_layers} "
            f"{stored}; make one with `exl3 quantize`"
        )
    for field in _SHAPE_FIELDS:
        theirs, ours = overlay.text.get(field), base.text.get(field)
        if theirs != ours:
            raise refuse(
                f"config.json has {field} {theirs!r}, and that of {base.folder} has "
                f"{ours!r}"
            )
    exl3 = [*base.draft_experts, *base.draft_linears]
    if exl3:
        raise ToolError(
            f"{base.folder}: its MTP layer is EXL3 already ({exl3[0]}); graft onto a "
            "checkpoint with a dense one"
        )
    for layer in overlay.draft_layers:
        if base.drafts and layer not in base.draft_layers:
            raise refuse(
                f"has an MTP layer {layer}, and {base.folder} has "
                f"{', '.join(map(str, base.draft_layers))}"
            )
    theirs_at, ours_at = _prefixes(overlay.drafts), _prefixes(base.drafts)
    if ours_at and not theirs_at <= ours_at:
        raise refuse(
            f"names its MTP layer {min(theirs_at)}..., and {base.folder} "
            f"{min(ours_at)}..."
        )
    if not base.drafts and not set(overlay.slots()) - set(overlay.draft_experts):
        raise ToolError(
            f"{overlay.folder}: has only the experts of an MTP layer, and "
            f"{base.folder} has no MTP layer at all; use an OVERLAY with all of it"
        )


def _prefixes(modules: Mapping[str, Any]) -> set[str]:
    return {module.partition("layers.")[0] + "layers." for module in modules}


def _check_slices(base: Side, overlay: Side) -> None:
    for name, layer in overlay.draft_experts.items():
        if not layer.sliced:
            continue
        where = f"{overlay.folder}: {name}"
        for expert, codes in enumerate(layer.encodings):
            if any(code.codebook is not Codebook.MCG for code in codes):
                label = next(
                    code.codebook.label
                    for code in codes
                    if code.codebook is not Codebook.MCG
                )
                raise ToolError(
                    f"{where}: expert {expert} has codebook {label}, and slices have "
                    "mcg, the only one of the rank-sliced format; encode it again"
                )
        if base.tail is None:
            continue
        if layer.ranks != base.tail.ranks:
            raise ToolError(
                f"{where}: is stored in {layer.ranks} slices, and {base.folder} has "
                f"{TAIL}.tp {base.tail.ranks}; encode it with --tp {base.tail.ranks}"
            )
        if layer.shared_h != base.tail.shared_h:
            has = "has" if layer.shared_h else "lacks"
            raise ToolError(
                f"{where}: {has} vectors that its experts share, unlike the experts of "
                f"{base.folder} ({TAIL}.rotation_layout); encode it again"
            )


def _same(
    base: Side, ours: list[TensorHeader], overlay: Side, theirs: list[TensorHeader]
) -> bool:
    """Whether two modules have the same tensors, byte for byte."""
    looks = [
        sorted((header.name, header.dtype, header.shape) for header in headers)
        for headers in (ours, theirs)
    ]
    if looks[0] != looks[1]:
        return False
    by_name = {header.name: header for header in ours}
    return all(_bytes_equal(base, by_name[it.name], overlay, it) for it in theirs)


def _bytes_equal(
    base: Side, ours: TensorHeader, overlay: Side, theirs: TensorHeader
) -> bool:
    import torch

    one, other = (
        side.read(header).reshape(-1).view(torch.uint8)
        for side, header in ((base, ours), (overlay, theirs))
    )
    return torch.equal(one, other)


def parts(
    headers: list[TensorHeader], limit: int = 4 << 30
) -> Iterator[list[TensorHeader]]:
    """Shares tensors among files of at most so many bytes."""
    part: list[TensorHeader] = []
    size = 0
    for header in headers:
        if part and size + header.num_bytes > limit:
            yield part
            part, size = [], 0
        part.append(header)
        size += header.num_bytes
    if part:
        yield part
