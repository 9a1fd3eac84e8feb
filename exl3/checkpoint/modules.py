# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Tensors by the module that they belong to."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exl3.checkpoint.experts import Slice
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.matrix import is_exl3
from exl3.format.errors import TensorError, UnsupportedFormatError
from exl3.format.names import PROJECTION_OF, UNKNOWN_LAYERS, layer_of, parse_name

Fields = dict[str, TensorHeader]

#: Tensors by which other quantizations are told.
_FOREIGN_FIELDS = {
    "weight_scale": "FP8 or NVFP4",
    "weight_scale_inv": "block FP8",
    "weight_scale_2": "NVFP4",
    "weight_global_scale": "NVFP4",
    "weight_packed": "compressed-tensors",
    "weight_zero_point": "compressed-tensors",
    "input_scale": "FP8 or NVFP4",
    "input_global_scale": "NVFP4",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "absmax": "bitsandbytes",
}
#: What a dense weight may be stored as.
_DENSE_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})
#: Projections that are computed as one module, and so are stored in one way.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)


@dataclass
class Modules:
    """The modules of a checkpoint."""

    linears: dict[str, Fields] = field(default_factory=dict)  # EXL3 ones
    dense: dict[str, Fields] = field(default_factory=dict)  # all others
    experts: dict[str, list[Slice]] = field(default_factory=dict)  # EXL3 layers
    dense_experts: dict[str, list[Slice]] = field(default_factory=dict)


def group_by_module(headers: Iterable[TensorHeader]) -> dict[str, Fields]:
    """Every module's tensors, by the last part of their names."""
    modules: dict[str, Fields] = {}
    for header in headers:
        module, _, name = header.name.rpartition(".")
        fields = modules.get(module)
        if fields is None:
            fields = modules[module] = {}
        fields[sys.intern(name)] = header
    return modules


def sort_modules(grouped: Mapping[str, Fields]) -> Modules:
    """Tells routed experts from other modules, and EXL3 from dense ones."""
    modules = Modules()
    layers: dict[str, list[Slice]] = {}
    for module, fields in grouped.items():
        match = parse_name(next(iter(fields.values())).name)
        if match is not None and match["experts"] is not None:
            part = Slice(match["expert"], match["projection"], match["rank"], fields)
            layers.setdefault(match["experts"], []).append(part)
        elif is_exl3(fields):
            modules.linears[module] = fields
        else:
            modules.dense[module] = fields
    for name, slices in layers.items():
        if any(is_exl3(part.fields) for part in slices):
            modules.experts[name] = slices
        else:
            modules.dense_experts[name] = slices
    return modules


def check_layers_stored(modules: Modules, num_layers: int) -> None:
    """Refuses a checkpoint that lacks a whole decoder layer.

    Args:
        modules: All modules.
        num_layers: Decoder layers. A draft may be stored without any of them.

    Raises:
        TensorError: A layer between or after others has no tensor.
    """
    names = (modules.linears, modules.dense, modules.experts, modules.dense_experts)
    stored = {layer_of(name, num_layers) for group in names for name in group}
    decoders = {at for at in stored if at is not None and at < num_layers}
    if not decoders or len(decoders) == num_layers or num_layers == UNKNOWN_LAYERS:
        return
    missing = next(at for at in range(num_layers) if at not in decoders)
    raise TensorError(
        f"layer {missing}: no tensor is stored for it, and config.json has "
        f"num_hidden_layers {num_layers}; fetch the missing file, or use the config of "
        "this checkpoint"
    )


def check_modules(modules: Modules) -> None:
    """Refuses modules that no model has, or that cannot stand beside EXL3 ones.

    Raises:
        CheckpointError: A module is EXL3 and has a name that no model has, a module is
            quantized in another way, or part of a fused module is EXL3 and part is not.
    """
    for module, fields in modules.linears.items():
        _check_name(module, fields)
    for fields in (*modules.linears.values(), *modules.dense.values()):
        _check_foreign(fields)
    for layers in (modules.experts, modules.dense_experts):
        for slices in layers.values():
            for part in slices:
                _check_foreign(part.fields)
    for module, fields in modules.dense.items():
        parent, _, name = module.rpartition(".")
        for group in FUSED:
            if name not in group or "weight" not in fields:
                continue
            for sibling in group:
                other = modules.linears.get(f"{parent}.{sibling}")
                if other is not None:
                    raise TensorError(
                        f"{module}: is dense ({fields['weight'].name} in "
                        f"{fields['weight'].file}), and {parent}.{sibling} is EXL3; "
                        f"{', '.join(group)} are computed as one, so store all of them "
                        "in one way"
                    )


def _check_foreign(fields: Mapping[str, TensorHeader]) -> None:
    if not _FOREIGN_FIELDS.keys().isdisjoint(fields):
        name = next(name for name in fields if name in _FOREIGN_FIELDS)
        kind, header = _FOREIGN_FIELDS[name], fields[name]
    elif "weight" in fields and fields["weight"].dtype not in _DENSE_DTYPES:
        header = fields["weight"]
        kind = header.dtype
    else:
        return
    raise UnsupportedFormatError(
        f"{header.file}: {header.name} belongs to another quantization ({kind}), and "
        "other modules of the checkpoint are EXL3; convert this module to EXL3 or BF16"
    )


def _check_name(module: str, fields: Fields) -> None:
    """An EXL3 module that is not a routed expert's must not look like one."""
    name = next(iter(fields.values())).name
    match = parse_name(name)
    if "r7_shared" in module:
        raise UnsupportedFormatError(
            f"{name}: r7_shared marks a format that resembles EXL3 and is not "
            "supported; convert the model to plain or rank-sliced EXL3"
        )
    if ".experts." in f"{module}.":
        raise UnsupportedFormatError(
            f"{name}: routed experts are stored one by one, each with the projections "
            f"{', '.join(PROJECTION_OF)}; convert the layer again"
        )
    if match is not None and match["rank"] is not None:
        raise UnsupportedFormatError(
            f"{name}: only routed experts are stored in slices of ranks; store the "
            "whole matrix"
        )
