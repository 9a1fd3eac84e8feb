# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Everything that `exl3 inspect` tells of a checkpoint, as plain data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exl3.checkpoint.agreement import decoder_layers
from exl3.checkpoint.plan import Survey, text_config
from exl3.checkpoint.ranks import inner_cuts, legal_sizes, problem_with
from exl3.tools.inspect.layers import Layer, list_layers, mean_bits
from exl3.tools.inspect.memory import (
    ALLOWANCE,
    GIB,
    UTILIZATION,
    Memory,
    assumptions,
    memory_by_size,
)

#: Sizes of tensor parallelism that people have machines for.
_COMMON_SIZES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Machine:
    """What a checkpoint is to be served on, as far as it was said."""

    tp: int | None = None  # tensor-parallel ranks
    gpus: int | None = None
    gpu_bytes: int | None = None  # memory of each
    max_model_len: int | None = None  # tokens


def summarize(
    found: Survey,
    config: Mapping[str, Any],
    widths: Iterable[int] | None,
    machine: Machine | None = None,
) -> dict[str, Any]:
    """The report that `--json` prints.

    Args:
        found: What is stored.
        config: Its `config.json`.
        widths: Routed experts of each layer, if layers differ.
        machine: What it is to be served on.
    """
    machine = machine or Machine()
    plan, num_layers = found.checkpoint.plan, decoder_layers(text_config(config))
    layers = list_layers(found, num_layers)
    drafts = [layer for layer in layers if layer.kind == "MTP"]
    draft = "exl3" if any(layer.exl3_bytes for layer in drafts) else "dense"
    legal = legal_sizes(plan, config)
    asked = sorted({*_COMMON_SIZES, machine.tp or 2})
    shown = [size for size in legal if machine.gpus is None or size <= machine.gpus]
    memory = []
    if num_layers < 10**6:  # a count that the config states
        memory = memory_by_size(found, config, shown, len(drafts), machine.gpu_bytes)
    return {
        "is_exl3": plan.is_exl3,
        "layers": [layer.plain() for layer in layers],
        "expert_widths": None if widths is None else list(widths),
        "draft": draft if drafts else None,
        "tensors": sum(map(len, found.tensors.values())),
        **_totals(layers),
        "tensor_parallel": legal,
        "not_tensor_parallel": {
            size: problem
            for size in asked
            if (problem := problem_with(plan, config, size)) is not None
        },
        "cut_inside_blocks": {
            size: [cut._asdict() for cut in cuts]
            for size in asked
            if size in legal and (cuts := inner_cuts(plan, config, size))
        },
        "memory": [{**vars(it), "fixed": it.fixed} for it in memory],
        "assumptions": assumptions(machine.gpu_bytes),
        "warnings": list(plan.warnings),
        "problems": _problems(memory, text_config(config), machine),
    }


def _totals(layers: Iterable[Layer]) -> dict[str, Any]:
    layers = list(layers)
    weights = sum(layer.weights for layer in layers)
    code_bits = sum(layer.code_bits for layer in layers)
    return {
        "exl3_bytes": sum(layer.exl3_bytes for layer in layers),
        "dense_bytes": sum(layer.dense_bytes for layer in layers),
        "exl3_weights": weights,
        "bits_per_weight": mean_bits(code_bits, weights),
        "bits_per_weight_with_scales": mean_bits(
            8 * sum(layer.exl3_bytes for layer in layers), weights
        ),
    }


def _problems(
    memory: list[Memory], text: Mapping[str, Any], machine: Machine
) -> list[str]:
    """Why the machine cannot serve it, one line each."""
    problems = []
    if machine.tp and machine.gpus and machine.tp > machine.gpus:
        problems.append(
            f"--tp {machine.tp} needs as many GPUs, and --gpus is {machine.gpus}; "
            "give more GPUs or fewer ranks"
        )
    length = machine.max_model_len
    longest = text.get("max_position_embeddings")
    if length is not None and type(longest) is int and length > longest:
        problems.append(
            f"config.json: max_position_embeddings is {longest}, and --max-model-len "
            f"{length}; ask for at most {longest}"
        )
    if machine.gpu_bytes is None:
        return problems
    needed = length or 1
    fitting = [
        it.size for it in memory if max(it.kv_tokens.values(), default=1) >= needed
    ]
    asked = [it for it in memory if it.size == machine.tp] if machine.tp else memory
    if not asked or any(it.size in fitting for it in asked):
        return problems
    best = max(asked, key=lambda it: max(it.kv_tokens.values(), default=0))
    gpu, usable = machine.gpu_bytes, int(machine.gpu_bytes * UTILIZATION)
    if not any(best.kv_tokens.values()):
        problem = (
            f"{best.size} GPUs of {gpu / GIB:g} GiB are too small: a GPU needs "
            f"{_gib(best.weights + best.draft)} for weights, {_gib(best.workspace)} "
            f"for workspace and {_gib(ALLOWANCE)} allowed for the rest, of "
            f"{_gib(usable)} that vLLM takes"
        )
        remedy = "use larger GPUs, or fewer bits per weight"
    else:
        tokens = max(best.kv_tokens.values())
        problem = (
            f"{best.size} GPUs of {gpu / GIB:g} GiB hold a KV cache of {tokens} "
            f"tokens, and --max-model-len is {length}"
        )
        remedy = f"ask for at most {tokens}"
    others = [size for size in fitting if size != machine.tp]
    if others:
        remedy = f"use --tensor-parallel-size {others[0]}, where it fits"
    return [*problems, f"{problem}; {remedy}"]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
