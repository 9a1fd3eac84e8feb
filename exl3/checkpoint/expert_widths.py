# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How many routed experts each layer of a checkpoint holds.

A config can say it in many ways; the router gates that the checkpoint stores decide.
Everything here works on plain dictionaries and shapes, so that a server and a tool
give the same answer and the same refusal.

Layers are counted as the checkpoint's tensor names count them: the decoder layers
first, then the draft (MTP) layers.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as brief  # a hostile value must not fill the log
from typing import Any

from exl3.checkpoint.layers import LayerPlan, count_field
from exl3.checkpoint.routing import Routing
from exl3.checkpoint.stored_widths import StoredWidths, check_layers, check_parts
from exl3.format.errors import CheckpointError
from exl3.format.tail import TAIL

#: The field in which a checkpoint should state its widths.
PER_LAYER_FIELD = "n_routed_experts_per_layer"
#: Fields that state one width for the whole model.
SCALAR_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts")
_TAIL_FIELD = f"{TAIL}.experts_per_layer"
#: Fields that state a width for each layer. A dot goes into a nested field.
PER_LAYER_FIELDS = (
    PER_LAYER_FIELD,
    "num_experts_per_layer",
    "per_layer_num_experts",
    "num_local_experts_per_layer",
    "reap_pruning.n_routed_experts_per_layer",
    _TAIL_FIELD,
)
#: Layers of the longest list that a refusal writes out, to be copied.
_MOST_SHOWN = 500
#: Fields that say which layers have routed experts, and how they are routed.
SHAPE_FIELDS = (
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "mlp_layer_types",
    "first_k_dense_replace",
    "moe_layer_freq",
    "decoder_sparse_step",
    "mlp_only_layers",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "topk_method",
)


def resolve_widths(
    config: Mapping[str, Any], stored: StoredWidths
) -> tuple[int, ...] | None:
    """The width of every layer, or None if the checkpoint has one width throughout.

    Args:
        config: The model's config (the text model's, of a multimodal one).
        stored: What the headers say; empty if they cannot be read.

    Returns:
        One entry a layer by global index, 0 for dense layers.

    Raises:
        CheckpointError: The config contradicts itself or the checkpoint, or a width
            cannot be routed.
    """
    config = move_widths(config)
    plan = LayerPlan.from_config(config)
    # Qwen3-Next's config does not count its draft, and its names say what it is.
    plan = replace(plan, num_drafts=max(plan.num_drafts, stored.num_mtp))
    check_parts(stored)
    check_layers(stored, plan)
    field, declared = _declared(config, plan, stored)
    widths = [0] * (plan.num_layers + plan.num_drafts)
    for layer in (*plan.moe_layers, *plan.drafts):
        gate = stored.gates.get(layer)
        says = declared.get(layer)
        is_draft = layer >= plan.num_layers
        if says is None and is_draft:
            # A list may end with the decoder layers, and a checkpoint may come
            # without the draft that its config counts.
            says = scalar_width(config) or max(declared.values(), default=0)
        if gate is not None:
            held = gate.shape[0]
            # A width for the whole model does not bind the draft: it may come from
            # another checkpoint.
            binding = not is_draft or (field is not None and layer in declared)
            if binding and says is not None and says != held:
                raise CheckpointError(
                    f"config.json: {field or 'the expert count'} gives layer {layer} "
                    f"a width of {says}, but {gate.name} in {gate.file} has {held} "
                    f"rows; {_correction(config, plan, stored)}"
                )
            widths[layer] = held
        elif says is not None:
            widths[layer] = says
    routing = Routing.from_config(config, biased=bool(stored.biases))
    _check_routing(routing, plan, widths, field)
    if field is None and len({width for width in widths if width}) <= 1:
        return None
    return tuple(widths)


def move_widths(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Moves widths by layer from where a width for the whole model belongs.

    Config classes of transformers check that `n_routed_experts` is an integer, and
    raise when a field that varies by layer is read for the whole model. So a list or
    an object under its name, and widths in `per_layer_config`, move to the field for
    widths by layer.

    Args:
        config: The text model's config; not changed.

    Returns:
        The same object if there was nothing to move, else a changed copy.

    Raises:
        CheckpointError: That field has others already.
    """
    field = next((f for f in SCALAR_FIELDS if _is_by_layer(config.get(f))), None)
    if field is not None:
        widths = config[field]
        each = widths.values() if isinstance(widths, Mapping) else widths
        counts = [width for width in each if type(width) is int]
        moved = {**config, field: max(counts, default=0)}
        return _with_widths(moved, field, widths)

    layers = config.get("per_layer_config")
    if not isinstance(layers, Mapping):
        return config
    widths, rest = {}, {}
    for layer, fields in layers.items():
        kept = dict(fields) if isinstance(fields, Mapping) else fields
        for field in SCALAR_FIELDS:
            if isinstance(kept, dict) and field in kept:
                widths[str(layer)] = kept.pop(field)
        if kept:
            rest[layer] = kept
    if not widths:
        return config
    moved = {**config, "per_layer_config": rest}
    if not rest:
        del moved["per_layer_config"]
    return _with_widths(moved, "per_layer_config", widths)


def _is_by_layer(value: object) -> bool:
    return isinstance(value, list | Mapping)


def _with_widths(config: dict[str, Any], field: str, widths: Any) -> dict[str, Any]:
    """A config with widths that were found in a field where they do not belong."""
    stated = config.get(PER_LAYER_FIELD)
    if stated not in (None, widths):
        raise CheckpointError(
            f"config.json: {field} gives layers the widths {brief(widths)}, and "
            f"{PER_LAYER_FIELD} is {brief(stated)}; keep the right one"
        )
    return {**config, PER_LAYER_FIELD: widths}


def scalar_width(config: Mapping[str, Any]) -> int | None:
    """The one width that a config states for the whole model, if it does.

    Raises:
        CheckpointError: What it states is no count.
    """
    for field in SCALAR_FIELDS:
        if config.get(field) is not None:
            return count_field(config, field)
    return None


def _declared(
    config: Mapping[str, Any], plan: LayerPlan, stored: StoredWidths
) -> tuple[str | None, dict[int, int]]:
    """What the config says of each layer, and the field that says it.

    Every per-layer field that is present must hold; the first one is returned.
    """
    scalar = scalar_width(config)
    result: tuple[str | None, dict[int, int]] | None = None
    for field in PER_LAYER_FIELDS:
        value = _lookup(config, field)
        if value is None or (field == _TAIL_FIELD and type(value) is int):
            # A tail of one width counts its own layers only, and checks them itself.
            continue
        readings = _readings(field, value, plan, scalar)
        fitting = [widths for widths in readings if _fits(widths, stored)]
        widths = (fitting or readings)[0]
        if result is None:
            result = field, widths
            continue
        # Of two fields only one holds: name the other, with the layer.
        if not fitting and _fits(result[1], stored):
            return field, widths
        if fitting and not _fits(result[1], stored):
            return result
        first, stated = result
        if not any(_agree(stated, reading) for reading in fitting or readings):
            raise CheckpointError(
                f"config.json: {first} and {field} give different widths, "
                f"{brief(stated)} and {brief(widths)} by layer; keep the right one"
            )
    if result is not None:
        return result
    scalars = {name: config[name] for name in SCALAR_FIELDS if config.get(name)}
    if len(set(scalars.values())) > 1:
        raise CheckpointError(
            f"config.json: {' and '.join(scalars)} give different widths, "
            f"{' and '.join(map(brief, scalars.values()))}; keep the right one"
        )
    layers = (*plan.moe_layers, *plan.drafts)
    return None, {} if scalar is None else dict.fromkeys(layers, scalar)


def _readings(
    field: str, value: Any, plan: LayerPlan, scalar: int | None
) -> list[dict[int, int]]:
    """The ways in which a per-layer field can be meant, likeliest first."""
    moe, drafts = plan.moe_layers, plan.drafts
    if isinstance(value, Mapping):
        widths = {} if scalar is None else dict.fromkeys((*moe, *drafts), scalar)
        for key, width in value.items():
            if not re.fullmatch("[0-9]{1,6}", str(key)):
                raise CheckpointError(
                    f"config.json: {field} has the key {brief(key)}, which is no layer "
                    "index"
                )
            layer = int(key)
            if layer >= plan.num_layers + plan.num_drafts:
                raise CheckpointError(
                    f"config.json: {field} has the key {layer}, but the model has "
                    f"{plan.num_layers} layers and {plan.num_drafts} draft layers"
                )
            if layer in moe or layer in drafts:
                widths[layer] = _width(field, layer, width)
        return [widths]
    if not isinstance(value, list):
        raise CheckpointError(
            f"config.json: {field} is {brief(value)}; expected a list with a width for "
            "each layer, or an object from layer index to width"
        )
    total = plan.num_layers + plan.num_drafts
    orders: list[tuple[int, ...]] = []
    by_index = tuple(range(len(value)))
    if len(value) in (plan.num_layers, total):
        orders.append(by_index)
    if len(value) == len(moe):
        orders.append(moe)
    if len(value) == len(moe) + len(drafts):
        orders.append((*moe, *drafts))
    if not orders:
        raise CheckpointError(
            f"config.json: {field} has {len(value)} entries; the model has "
            f"{plan.num_layers} layers and {plan.num_drafts} draft layers "
            f"({total} in all), of which {len(moe)} and {len(drafts)} have routed "
            "experts; give one entry for each of these"
        )
    holders = {*moe, *drafts}
    readings = []
    for order in orders:
        entries = {
            layer: _width(field, layer, width)
            for layer, width in zip(order, value, strict=True)
            if layer in holders
        }
        readings.append(entries)
    if field.startswith("reap_pruning"):
        readings.reverse()  # written in the order of the MoE layers
    elif len(readings) > 1 and any(
        value[layer] for layer in by_index if layer not in holders
    ):
        readings.reverse()  # a dense layer has no width: not by global index
    return readings


def _width(field: str, layer: int, value: Any) -> int:
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise CheckpointError(
            f"config.json: {field} gives layer {layer} the width {brief(value)}, "
            "which is no count"
        )
    return value


def _fits(widths: Mapping[int, int], stored: StoredWidths) -> bool:
    return all(
        stored.gates[layer].shape[0] == width
        for layer, width in widths.items()
        if layer in stored.gates
    )


def _agree(one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    return all(one[layer] == other[layer] for layer in one.keys() & other.keys())


def _correction(
    config: Mapping[str, Any], plan: LayerPlan, stored: StoredWidths
) -> str:
    """The field that would describe what is stored."""
    layers = range(plan.num_layers + plan.num_drafts)
    holders = {*plan.moe_layers, *plan.drafts}
    scalar = scalar_width(config) or 0
    true = [
        (stored.gates[layer].shape[0] if layer in stored.gates else scalar)
        if layer in holders
        else 0
        for layer in layers
    ]
    shown = true if len(true) <= _MOST_SHOWN else brief(true)
    return f'set "{PER_LAYER_FIELD}": {shown}, or use the checkpoint that it describes'


def _check_routing(
    routing: Routing, plan: LayerPlan, widths: list[int], field: str | None
) -> None:
    """Every width must leave the router its choice of experts."""
    top_k, groups = routing.top_k, routing.groups
    for layer in (*plan.moe_layers, *plan.drafts):
        width = widths[layer]
        if width == 0 and field is None:
            continue  # nothing states this layer's width; upstream decides
        where = f"layer {layer} has {width} routed experts"
        if top_k == 0:
            raise CheckpointError(
                f"{where}, but config.json has num_experts_per_tok 0; set how many of "
                "them a token goes to"
            )
        if width < top_k:
            raise CheckpointError(
                f"{where}, fewer than num_experts_per_tok {top_k}; keep at least "
                f"{top_k} in every layer"
            )
        if width % groups:
            raise CheckpointError(
                f"{where}, which n_group {groups} does not divide; prune to a multiple "
                f"of {groups}, or set n_group and topk_group to 1"
            )
        if width < routing.least_width:
            raise CheckpointError(
                f"{where} in {groups} groups of {width // groups}, too few to choose "
                f"{routing.top_groups} groups and {top_k} experts from them; keep at "
                f"least {routing.least_width}, or set n_group and topk_group to 1"
            )


def _lookup(config: Mapping[str, Any], field: str) -> Any:
    value: Any = config
    for part in field.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value
