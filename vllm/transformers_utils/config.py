# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Extends upstream's config reading by what the checkpoint itself says.

The number of routed experts of each layer, and whether the weights are EXL3.

Every config of the engine comes through here, the target's and the draft's, in the
first seconds of a start and before any weight is read.
"""

from functools import wraps
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from exl3.format.errors import MetadataError
from vllm.fork import extend
from vllm.transformers_utils import config_upstream as upstream
from vllm.transformers_utils import exl3, expert_widths


def get_config(
    model: str | Path,
    trust_remote_code: bool,
    revision: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> PreTrainedConfig:
    """Upstream's `get_config`, with widths and quantization as they are stored.

    Raises:
        CheckpointError: The config is damaged, or it and the checkpoint contradict
            each other.
    """
    try:
        config = _upstream_get_config(
            model, trust_remote_code, revision, *args, **kwargs
        )
    except Exception as error:
        # Of many a damaged file the reader knows more than who stumbled over it.
        expert_widths.refuse_files(model, revision)
        if isinstance(error, StrictDataclassError):
            reason = " ".join(str(error).split())
            raise MetadataError(f"config.json: {reason}; correct the field") from error
        raise
    expert_widths.resolve_config(config, model, revision)
    exl3.resolve_config(config, model, revision)
    return config


def _move_widths_on_reading() -> None:
    """Has transformers see the widths in a field that its config classes accept.

    It reads `config.json` in several places (config, tokenizer, processor), all of
    them through this one method.
    """
    read = PreTrainedConfig.get_config_dict.__func__

    @wraps(read)
    def get_config_dict(cls, *args: Any, **kwargs: Any):
        fields, unused = read(cls, *args, **kwargs)
        if expert_widths.is_supported(fields.get("architectures")):
            fields = expert_widths.move_widths_to_list(fields)
        return fields, unused

    PreTrainedConfig.get_config_dict = classmethod(get_config_dict)


_upstream_get_config = upstream.get_config
_move_widths_on_reading()
extend(__name__, upstream)
