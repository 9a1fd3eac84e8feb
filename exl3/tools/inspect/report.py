# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Everything that `exl3 inspect` tells of a checkpoint, as plain data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exl3.checkpoint.agreement import decoder_layers
from exl3.checkpoint.plan import Survey, text_config
from exl3.checkpoint.ranks import inner_cuts, legal_sizes, problem_with
from exl3.format.names import UNKNOWN_LAYERS
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
    if num_layers != UNKNOWN_LAYERS:
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
        "superseded_bytes": sum(layer.superseded_bytes for layer in layers),
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
    asked = [it for it in memory if it.size == machine.tp] if machine.tp else memory
    needed = length or 1
    if not asked or any(_fits(it, "bfloat16", needed) for it in asked):
        return problems
    best = max(asked, key=lambda it: (it.kv_tokens.get("fp8", 0), it.size))
    others = [it.size for it in memory if _fits(it, "bfloat16", needed)]
    what = f"--gpu-memory {machine.gpu_bytes / GIB:g} on {best.size} GPUs"
    if not any(best.kv_tokens.values()):
        what += (
            f" is too small: each needs {_gib(best.weights + best.draft)} for "
            f"weights, {_gib(best.workspace)} for workspace and {_gib(ALLOWANCE)} for "
            f"the rest, of {_gib(int(machine.gpu_bytes * UTILIZATION))} that vLLM takes"
        )
    else:
        what += (
            f" holds a KV cache of {best.kv_tokens['bfloat16']} tokens, and "
            f"--max-model-len is {needed}"
        )
    if others:
        remedy = f"use --tensor-parallel-size {others[0]}, where it fits"
    elif _fits(best, "fp8", needed):
        remedy = f"use --kv-cache-dtype fp8, which holds {best.kv_tokens['fp8']}"
    elif any(best.kv_tokens.values()):
        remedy = f"ask for at most {max(best.kv_tokens.values())}, with an fp8 cache"
    else:
        remedy = "use more or larger GPUs, or fewer bits per weight"
    problems.append(f"{what}; {remedy}")
    return problems


def _fits(memory: Memory, dtype: str, tokens: int) -> bool:
    """Whether so many tokens fit; yes if the config does not tell what they take."""
    return memory.fits and memory.kv_tokens.get(dtype, tokens) >= tokens


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
