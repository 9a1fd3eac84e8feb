# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Resolves the number of routed experts of each layer as a config is read.

The answer travels in the config as `resolved_expert_widths`: one entry a layer by
global index, draft layers included. `vllm/model_executor/models/expert_widths.py`
builds the layers from it.
"""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from exl3.checkpoint.expert_widths import (
    PER_LAYER_FIELDS,
    SCALAR_FIELDS,
    SHAPE_FIELDS,
    move_widths,
    resolve_widths,
)
from exl3.checkpoint.plan import read_config, text_config
from exl3.checkpoint.stored_widths import read_stored
from exl3.format.errors import CheckpointError
from vllm.logger import init_logger
from vllm.transformers_utils.checkpoint import (
    known_checkpoint,
    local_folder,
    read_folder,
)

logger = init_logger(__name__)

#: The attribute of a config that holds its widths: one for each layer by global index,
#: draft layers included, 0 for a dense layer. Absent if the model has one throughout.
#: No field of any `config.json`, so nobody else writes it.
RESOLVED_FIELD = "resolved_expert_widths"
#: Architectures whose MoE layers are built through `layer_config`. Others are left
#: to upstream, which has spellings of its own for some of them.
ARCHITECTURES = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        # Drafts.
        "DeepSeekMTPModel",
        "DeepseekV32MTPModel",
        "Glm4MoeMTPModel",
        "Glm4MoeLiteMTPModel",
        "Qwen3NextMTP",
        "Qwen3_5MoeMTP",
    }
)


def is_supported(architectures: Any) -> bool:
    """Whether a model of these architectures can have unequal widths.

    Args:
        architectures: The field as the config has it. What is no list of names is
            left to upstream, which refuses it.
    """
    names = architectures if isinstance(architectures, list) else []
    return any(isinstance(name, str) and name in ARCHITECTURES for name in names)


def move_widths_to_list(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrites the spellings of a `config.json` that transformers cannot hold.

    That is done before a config class sees them; see `move_widths`.

    Args:
        config: The parsed file; not changed.

    Returns:
        The same object if there was nothing to move, else a changed copy.
    """
    text = config.get("text_config")
    if isinstance(text, dict):
        inner = move_widths(text)
        return config if inner is text else {**config, "text_config": inner}
    moved = move_widths(config)
    return config if moved is config else dict(moved)


def resolve_config(
    config: PreTrainedConfig, model: str | Path, revision: str | None
) -> None:
    """Writes the widths of a checkpoint into its config, if they are unequal.

    Args:
        config: The model's config; changed in place.
        model: The checkpoint's folder, or its id on the hub.
        revision: The revision of the hub's checkpoint.

    Raises:
        CheckpointError: Config and checkpoint contradict each other, or a width cannot
            be routed.
    """
    text = config.get_text_config()
    if not (is_supported(config.architectures) or is_supported(text.architectures)):
        return
    fields = _plain_fields(text)
    # A checkpoint that is still to be fetched, or the rest of it, is checked again,
    # layer by layer, when its tensors are loaded.
    checkpoint = known_checkpoint(model, revision)
    stored = read_stored((), 0) if checkpoint is None else checkpoint.widths
    widths = resolve_widths(fields, stored)
    if widths is None:
        return
    setattr(text, RESOLVED_FIELD, list(widths))
    # Names of experts are matched against a table of this many: wide enough for
    # every layer, and a narrower layer never stores the higher ids.
    for field in scalar_fields(text):
        setattr(text, field, max(widths))
    logger.info_once("Routed experts by layer: %s", str(list(widths)))


def refuse_files(model: str | Path, revision: str | None) -> None:
    """Refuses a checkpoint by its files, of which no config could be made.

    Args:
        model: The checkpoint's folder, or its id on the hub.
        revision: The revision of the hub's checkpoint.

    Raises:
        CheckpointError: The reader knows what is wrong with them.
    """
    folder = local_folder(model, revision)
    if folder is None or not os.path.lexists(folder / "config.json"):
        return
    config = read_config(folder)
    checkpoint, text = read_folder(folder), text_config(config)
    if is_supported(config.get("architectures")) or is_supported(
        text.get("architectures")
    ):
        resolve_widths(text, checkpoint.widths)


def _plain_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a config that widths are read from, as a plain dictionary."""
    names = {field.partition(".")[0] for field in PER_LAYER_FIELDS}
    names |= {*SCALAR_FIELDS, *SHAPE_FIELDS}
    fields = {}
    for name in names:
        try:
            fields[name] = getattr(config, name, None)
        except RuntimeError:  # transformers: the field varies from layer to layer
            fields[name] = None
    return fields


def scalar_fields(config: PreTrainedConfig) -> list[str]:
    """The model-wide fields that a config has; upstream reads one of them.

    Which one depends on the family, and a pruner may have written another beside it.

    Raises:
        CheckpointError: It has none.
    """
    fields = [f for f in SCALAR_FIELDS if getattr(config, f, None) is not None]
    if not fields:
        raise CheckpointError(
            f"config.json: none of {', '.join(SCALAR_FIELDS)} is set, and the "
            "checkpoint has routed experts; set the one that this family uses"
        )
    return fields
