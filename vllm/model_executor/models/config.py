# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Extends upstream's checks of the engine's config by those of the widths."""

from typing import TYPE_CHECKING

from vllm.fork import extend
from vllm.model_executor.models import config_upstream as upstream
from vllm.model_executor.models.expert_widths import refuse_unsupported
from vllm.transformers_utils.expert_widths import ARCHITECTURES

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _checking_widths(
    checks: type[upstream.VerifyAndUpdateConfig],
) -> type[upstream.VerifyAndUpdateConfig]:
    """Upstream's checks of an architecture, followed by the fork's."""

    class WidthsChecked(checks):
        @staticmethod
        def verify_and_update_config(vllm_config: "VllmConfig") -> None:
            checks.verify_and_update_config(vllm_config)
            refuse_unsupported(vllm_config)

    return WidthsChecked


for _architecture in ARCHITECTURES:
    upstream.MODELS_CONFIG_MAP[_architecture] = _checking_widths(
        upstream.MODELS_CONFIG_MAP.get(_architecture, upstream.VerifyAndUpdateConfig)
    )

extend(__name__, upstream)
