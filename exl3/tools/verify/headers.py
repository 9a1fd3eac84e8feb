# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What is known of a checkpoint before an engine is booted on it."""

from dataclasses import dataclass
from pathlib import Path

from exl3.checkpoint.agreement import decoder_layers
from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.plan import read_config, read_with_modules, text_config
from exl3.checkpoint.ranks import check_tensor_parallel
from exl3.format.errors import CheckpointError
from exl3.format.names import layer_of

#: Files of which a tokenizer has at least one.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")


@dataclass(frozen=True)
class Headers:
    """What the questions depend on, and a line about the rest."""

    summary: str
    vocab_size: int
    context: int | None  # most tokens that the model takes, if the config says
    has_tokenizer: bool


def read_headers(folder: Path, ranks: int, *, speculative: bool) -> Headers:
    """Reads a checkpoint's headers as the server does.

    Args:
        folder: The checkpoint.
        ranks: Tensor-parallel ranks that must be able to share it.
        speculative: Whether it needs an MTP layer.

    Raises:
        CheckpointError: It cannot be served so.
    """
    config = read_config(folder)
    text = text_config(config)
    checkpoint, modules = read_with_modules(folder, config)
    resolve_widths(text, checkpoint.widths)
    plan = checkpoint.plan
    if ranks > 1:
        check_tensor_parallel(plan, config, ranks)
    vocab_size = text.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise CheckpointError(
            f"{folder / 'config.json'}: vocab_size is {vocab_size!r}; write the number "
            "of tokens"
        )
    num_layers = decoder_layers(text)
    layers = {layer_of(module, num_layers) for module in modules}
    drafts = sum(layer is not None and layer >= num_layers for layer in layers)
    if speculative and not drafts:
        raise CheckpointError(
            f"{folder}: has no MTP layer that could draft; leave out --speculative, or "
            "add a layer by `exl3 graft-mtp`"
        )
    has_tokenizer = any((folder / name).exists() for name in _TOKENIZERS)
    summary = [
        f"{sum(map(len, modules.values()))} tensors",
        f"{len(plan.linears)} EXL3 linears, {len(plan.experts)} EXL3 layers of experts"
        if plan.is_exl3
        else "no EXL3",
        f"{drafts} MTP layers" if drafts != 1 else "1 MTP layer",
    ]
    if not has_tokenizer:
        summary.append("no tokenizer, so prompts are token ids")
    context = text.get("max_position_embeddings")
    if not isinstance(context, int):
        context = None
    return Headers("; ".join(summary), vocab_size, context, has_tokenizer)
