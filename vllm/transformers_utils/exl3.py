# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Finds out, as a config is read, whether its checkpoint is EXL3.

The tensors decide. Whatever the config says of a quantization, or does not say, a
checkpoint with trellis tensors is served as EXL3, and no other one is.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedConfig

from exl3.checkpoint.headers import fingerprint
from exl3.checkpoint.plan import CheckpointPlan, read_plan
from exl3.format.errors import FileError
from vllm.logger import init_logger
from vllm.transformers_utils.expert_widths import fetched_folder

logger = init_logger(__name__)

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
    folder = local_folder(model, revision)
    declared = _is_declared(config)
    plan = None
    if folder is not None:
        try:
            plan = folder_plan(folder)
        except FileError:  # upstream may read it all the same
            if declared:
                raise
    stamp = {"quant_method": QUANT_METHOD}
    if plan is not None and plan.is_exl3:
        # What is compiled for one checkpoint must not be taken for another one in its
        # place, and vLLM's cache of compiled graphs is keyed by the config.
        stamp["files"] = _digest(folder)
    elif not declared or folder is not None:
        return
    text = config.get_text_config()
    for part in {id(config): config, id(text): text}.values():
        part.quantization_config = dict(stamp)
        if plan is not None and _has_head(plan):
            # Converters store a head of its own for tied embeddings.
            part.tie_word_embeddings = False


def checkpoint_plan(model: str | Path, revision: str | None) -> CheckpointPlan | None:
    """The plan of a checkpoint; None if it is not on this machine.

    Raises:
        CheckpointError: The checkpoint contradicts itself.
    """
    folder = local_folder(model, revision)
    return None if folder is None else folder_plan(folder)


def local_folder(model: str | Path, revision: str | None) -> Path | None:
    """The folder that holds all of a checkpoint, or None."""
    folder = Path(model)
    return folder if folder.is_dir() else fetched_folder(str(model), revision)


def folder_plan(folder: Path) -> CheckpointPlan:
    """The plan of the checkpoint in a folder; headers are read once."""
    return _read_plan(folder, fingerprint(folder), _stamp_of(folder / "config.json"))


@lru_cache(maxsize=4)
def _read_plan(folder: Path, _files: object, _config: object) -> CheckpointPlan:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise FileError(f"{folder / 'config.json'}: {error}; fetch it again") from error
    if not isinstance(config, Mapping):
        raise FileError(f"{folder / 'config.json'}: not a JSON object; fetch it again")
    plan = read_plan(folder, config)
    for warning in plan.warnings:
        logger.warning_once(warning)
    return plan


def _stamp_of(file: Path) -> tuple[int, int] | None:
    return (file.stat().st_size, file.stat().st_mtime_ns) if file.is_file() else None


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
