# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The files beside the tensors, for a checkpoint with another MTP layer."""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

from exl3.checkpoint.expert_widths import (
    PER_LAYER_FIELD,
    SCALAR_FIELDS,
    resolve_widths,
    scalar_width,
)
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.headers import INDEX_FILE
from exl3.checkpoint.json_files import read_json
from exl3.checkpoint.layers import LayerPlan
from exl3.checkpoint.metadata import QUANTIZATION_FILE
from exl3.format.metadata import UNQUANTIZED_BITS
from exl3.format.names import parse_name
from exl3.format.tail import TAIL
from exl3.tools.graft.layer import Graft, Side
from exl3.tools.quantize import metadata as written
from exl3.tools.shared.errors import ToolError

_DRAFT_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
#: Lists of modules that a quantization leaves alone, by the tools that write them.
_IGNORE_FIELDS = ("ignore", "exclude_modules", "modules_to_not_convert")
#: The tail in `quantization_config.json`.
_TAIL_AGAIN = "rank_sliced"

#: Entries of one object that are told one by one.
_MOST_SHOWN = 5

Files = dict[str, Any]


def edited_files(base: Side, overlay: Side, graft: Graft) -> Files:
    """The JSON files of BASE that change, but for the index.

    Args:
        base: The checkpoint to change.
        overlay: The one with the MTP layer.
        graft: What is exchanged.

    Returns:
        The content of each by its name; also of files that are new.

    Raises:
        CheckpointError: BASE's config does not describe BASE.
        ToolError: The metadata cannot express the outcome.
    """
    files: Files = {"config.json": deepcopy(dict(base.config))}
    config = files["config.json"]
    text = config["text_config"] if base.text is not base.config else config
    _count_drafts(text, base, overlay)
    widths = _resolve_widths(text, base, graft)
    _set_widths(text, graft, widths)
    tail = _edited_tail(base, overlay, widths, files)
    exl3 = [*overlay.draft_linears, *overlay.draft_experts]
    others = [module for module in base.modules if module not in base.drafts]
    for holder in (config, text):
        if tail is None:
            holder.pop(TAIL, None)
        elif holder is config or TAIL in holder:
            holder[TAIL] = deepcopy(tail)
        _edit_ignored(holder.get("quantization_config"), exl3, others)
    if "quantization_config" not in {**config, **text}:
        config["quantization_config"] = _block(overlay)
    if (base.folder / QUANTIZATION_FILE).exists():
        block = deepcopy(read_json(base.folder / QUANTIZATION_FILE))
        _edit_ignored(block, exl3, others)
        _edit_storage(block, graft)
        if _TAIL_AGAIN in block and tail is not None:
            block[_TAIL_AGAIN] = deepcopy(tail)
        files[QUANTIZATION_FILE] = block
    return {name: new for name, new in files.items() if new != _old(base, name)}


def edited_index(
    base: Side, graft: Graft, files: Mapping[str, Iterable[TensorHeader]]
) -> dict[str, Any]:
    """The index of the outcome.

    Args:
        base: The checkpoint to change.
        graft: What is exchanged.
        files: The tensors of each new file.
    """
    old = _old(base, INDEX_FILE) or {}
    gone = {header.name for header in graft.dropped}
    listed = old.get("weight_map")
    kept = [
        header
        for fields in base.modules.values()
        for header in fields.values()
        if header.name not in gone
        and (listed is None or listed.get(header.name) == header.file)
    ]
    added = [
        header._replace(file=file)
        for file, headers in files.items()
        for header in headers
    ]
    total = sum(header.num_bytes for header in (*kept, *added))
    return {
        **old,
        "metadata": {**old.get("metadata", {}), "total_size": total},
        "weight_map": {header.name: header.file for header in (*kept, *added)},
    }


def changes(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """What differs between two JSON values, a line each, or one for many alike."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        if old != new:
            yield f"{at}: {_brief(old)} becomes {_brief(new)}"
        return
    come, go = new.keys() - old.keys(), old.keys() - new.keys()
    other = [key for key in old if key in new and old[key] != new[key]]
    if len(come) + len(go) > _MOST_SHOWN:
        yield f"{at}: {len(come)} entries come and {len(go)} go"
        come = go = set()
    if len(other) > _MOST_SHOWN and all(isinstance(old[key], dict) for key in other):
        yield f"{at}: {len(other)} entries change"
        other = []
    for key in {**old, **new}:
        where = f"{at}.{key}" if at else str(key)
        if key in go:
            yield f"{where}: {_brief(old[key])} goes"
        elif key in come:
            yield f"{where}: {_brief(new[key])} comes"
        elif key in other:
            yield from changes(old[key], new[key], where)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(value)} entries)"


def _old(base: Side, name: str) -> Any:
    file = base.folder / name
    return read_json(file) if file.exists() else None


def _count_drafts(text: dict[str, Any], base: Side, overlay: Side) -> None:
    if not base.drafts:
        for field in _DRAFT_FIELDS:
            if overlay.text.get(field):
                text[field] = overlay.text[field]


def _resolve_widths(text: dict[str, Any], base: Side, graft: Graft) -> list[int]:
    """Routed experts of every layer of the outcome, 0 for dense layers."""
    plan = LayerPlan.from_config(text)
    widths = resolve_widths(base.text, base.stored)
    by_layer = dict(enumerate(widths or ()))
    if widths is None:
        scalar = scalar_width(text) or 0
        by_layer = dict.fromkeys((*plan.moe_layers, *plan.drafts), scalar)
    by_layer |= graft.widths
    size = max(plan.num_layers + plan.num_drafts, max(by_layer, default=-1) + 1)
    return [by_layer.get(layer, 0) for layer in range(size)]


def _set_widths(text: dict[str, Any], graft: Graft, widths: list[int]) -> None:
    """States the widths of the MTP layers, if one number does not."""
    value, scalar = text.get(PER_LAYER_FIELD), scalar_width(text)
    if isinstance(value, dict):
        value |= {str(layer): width for layer, width in graft.widths.items()}
    elif value is not None or any(width != scalar for width in graft.widths.values()):
        text[PER_LAYER_FIELD] = widths
    for field in SCALAR_FIELDS:
        if type(text.get(field)) is int:
            text[field] = max(text[field], *widths)


def _bits(side: Side, name: str) -> list[int]:
    """Bits of each expert of a layer; of projections that differ, the most."""
    encodings = side.plan.experts[name].encodings
    return [int(max(code.bits for code in codes)) for codes in encodings]


def _edited_tail(
    base: Side, overlay: Side, widths: list[int], files: Files
) -> dict[str, Any] | None:
    """The tail of the outcome; adds the file with the bits of experts if it changes."""
    experts = {
        overlay.layer_of(name): name
        for name, layer in overlay.draft_experts.items()
        if layer.sliced
    }
    whole = [
        overlay.layer_of(name)
        for name, layer in overlay.draft_experts.items()
        if not layer.sliced
    ]
    bits = {layer: _bits(overlay, name) for layer, name in sorted(experts.items())}
    old: dict[str, Any] | None = base.config.get(TAIL) or base.text.get(TAIL)
    tail = None if old is None else deepcopy(dict(old))
    if tail is None or base.tail is None:
        if not bits:
            return tail
        files[written.BITS_MAP_FILE] = written.bits_map(bits)
        ranks = next(overlay.draft_experts[name].ranks for name in experts.values())
        tail = written.rank_sliced_tail(bits, ranks)
        tail["experts_per_layer"] = widths
        return _with_shared_h(tail, overlay)
    first, last = tail["moe_layers"]
    if whole and last >= min(whole):
        tail["moe_layers"] = [first, base.num_layers - 1]
    if not bits:
        return tail
    if last < min(bits) - 1:
        raise ToolError(
            f"{base.folder}: {TAIL}.moe_layers ends with layer {last}, so one range of "
            f"layers cannot hold {min(bits)} too without those between; convert the "
            "checkpoint again"
        )
    tail["moe_layers"] = [first, max(last, *bits)]
    _add_widths(tail, widths, bits)
    stored = {
        int(code.bits)
        for name in experts.values()
        for codes in overlay.plan.experts[name].encodings
        for code in codes
    }
    _add_bits(tail, base, bits, stored, files)
    return tail


def _with_shared_h(tail: dict[str, Any], overlay: Side) -> dict[str, Any]:
    of_overlay = overlay.config.get(TAIL) or overlay.text.get(TAIL) or {}
    for field in ("rotation_layout", "shared_h_tensor_schema"):
        if field in of_overlay:
            tail[field] = of_overlay[field]
    return tail


def _add_widths(tail: dict[str, Any], widths: list[int], layers: Iterable[int]) -> None:
    value = tail["experts_per_layer"]
    if isinstance(value, dict):
        more = {str(layer): widths[layer] for layer in layers}
        tail["experts_per_layer"] = {**value, **more}
    elif isinstance(value, list):
        row = [*value, *[0] * (len(widths) - len(value))]
        for layer in layers:
            row[layer] = widths[layer]
        tail["experts_per_layer"] = row
    elif any(widths[layer] != value for layer in layers):
        tail["experts_per_layer"] = widths
        tail.pop("tr3_tail_per_layer", None)


def _add_bits(
    tail: dict[str, Any],
    base: Side,
    bits: Mapping[int, list[int]],
    stored: set[int],
    files: Files,
) -> None:
    """Declares the bits of the new experts, in the way that the others' are."""
    parsed = base.tail
    assert parsed is not None
    if parsed.bits_file is not None:
        field = str(parsed.bits_field)
        rows = {str(layer): {field: row} for layer, row in bits.items()}
        files[parsed.bits_file] = {**_old(base, parsed.bits_file), **rows}
        tail["k_values"] = sorted({*tail["k_values"], *stored})
        return
    by_layer = parsed.bits_by_layer
    if len(stored) == 1 and (by_layer is not None or stored == {parsed.bits}):
        if by_layer is not None:
            (k,) = stored
            more = {str(layer): k for layer in bits}
            tail["trellis_bits_by_layer"] = {**tail["trellis_bits_by_layer"], **more}
        return
    # One number for all no longer does: a number for each.
    all_bits = {
        base.layer_of(name): _bits(base, name)
        for name, layer in base.plan.experts.items()
        if layer.sliced
    }
    all_bits |= bits
    if (base.folder / written.BITS_MAP_FILE).exists():
        raise ToolError(
            f"{base.folder / written.BITS_MAP_FILE}: is there already, and {TAIL} "
            "needs a file of that name for the bits of its experts; move it away"
        )
    files[written.BITS_MAP_FILE] = written.bits_map(all_bits)
    tail.pop("trellis_bits_by_layer", None)
    values = {k for row in all_bits.values() for k in row} | stored
    tail |= {
        "bits": "mixed",
        "k_values": sorted(values),
        "bits_per_expert": f"{written.BITS_MAP_FILE}:{written.BITS_MAP_FIELD}",
    }


def _block(overlay: Side) -> dict[str, Any]:
    """A `quantization_config` for a checkpoint that had none."""
    codebooks = [matrix.codebook for matrix in overlay.draft_linears.values()]
    codebooks += [
        code.codebook
        for layer in overlay.draft_experts.values()
        for codes in layer.encodings
        for code in codes
    ]
    return written.quantization_config("mixed", UNQUANTIZED_BITS, codebooks[-1])


def _edit_ignored(block: Any, exl3: list[str], others: list[str]) -> None:
    """Takes out patterns that are only of what is EXL3 now."""
    if not isinstance(block, dict):
        return
    for field in _IGNORE_FIELDS:
        patterns = block.get(field)
        if isinstance(patterns, list):
            block[field] = [
                pattern
                for pattern in patterns
                if not isinstance(pattern, str)
                or not any(_covers(pattern, module) for module in exl3)
                or any(_covers(pattern, module) for module in others)
            ]


def _covers(pattern: str, module: str) -> bool:
    """Whether an entry of a list of ignored modules means a module or one within it."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return fnmatchcase(module, pattern) or pattern.startswith(f"{module}.")


def _edit_storage(block: dict[str, Any], graft: Graft) -> None:
    storage = block.get("tensor_storage")
    if not isinstance(storage, dict):
        return
    for header in graft.dropped:
        match = parse_name(header.name)
        if match is not None:
            storage.pop(match["module"], None)
    storage |= written.tensor_storage(graft.added)
