# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Finds out, as a config is read, whether its checkpoint is EXL3.

The tensors decide. Whatever the config says of a quantization, or does not say, a
checkpoint with trellis tensors is served as EXL3, and no other one is.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedConfig

from exl3.checkpoint.headers import fingerprint
from exl3.checkpoint.plan import CheckpointPlan
from exl3.format.errors import FileError
from vllm.transformers_utils.checkpoint import (
    known_checkpoint,
    local_folder,
    stored_checkpoint,
)

QUANT_METHOD = "exl3"


def resolve_config(
    config: PreTrainedConfig, model: str | Path, revision: str | None
) -> None:
    """Has the config of an EXL3 checkpoint say so, and leaves every other one alone.

    Args:
        config: The model's config; changed in place.
        model: The checkpoint's folder, or its id on the hub.
        revision: The revision of the hub's checkpoint.

    Raises:
        CheckpointError: The checkpoint is EXL3 and contradicts itself.
    """
    declared = _is_declared(config)
    try:
        checkpoint = known_checkpoint(model, revision)
    except FileError:  # upstream may read it all the same
        if declared:
            raise
        return
    plan = CheckpointPlan() if checkpoint is None else checkpoint.plan
    if not (plan.is_exl3 or (declared and checkpoint is None)):
        return
    stamp = {"quant_method": QUANT_METHOD}
    folder = local_folder(model, revision)
    if folder is not None:
        # What is compiled for one checkpoint must not be taken for another one in its
        # place, and vLLM's cache of compiled graphs is keyed by the config.
        stamp["files"] = _digest(folder)
    text = config.get_text_config()
    for part in {id(config): config, id(text): text}.values():
        part.quantization_config = dict(stamp)
        if _has_head(plan):
            # Converters store a head of its own for tied embeddings.
            part.tie_word_embeddings = False


def checkpoint_plan(model: str | Path, revision: str | None) -> CheckpointPlan | None:
    """The plan of a checkpoint; None if it is not on this machine.

    Raises:
        CheckpointError: The checkpoint contradicts itself.
    """
    checkpoint = stored_checkpoint(model, revision)
    return None if checkpoint is None else checkpoint.plan


def _is_declared(config: PreTrainedConfig) -> bool:
    """Whether a config says that its checkpoint is EXL3."""
    for part in (config, config.get_text_config()):
        stamp = getattr(part, "quantization_config", None)
        tail = getattr(part, "hybrid_tr3_tail", None)
        if isinstance(stamp, Mapping) and stamp.get("quant_method") == QUANT_METHOD:
            return True
        if isinstance(tail, Mapping):
            return True
    return False


def _digest(folder: Path) -> str:
    return hashlib.sha256(repr(fingerprint(folder)).encode()).hexdigest()


def _has_head(plan: CheckpointPlan) -> bool:
    return any(name.rpartition(".")[2] == "lm_head" for name in plan.linears)
