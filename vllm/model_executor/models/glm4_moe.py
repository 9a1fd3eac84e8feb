# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""GLM-4.5 to 4.7 with a width for every layer.

`Glm4MoeLite` and the MTP drafts build their MoE layers on this one.
"""

from vllm.fork import extend
from vllm.model_executor.models import glm4_moe_upstream as upstream
from vllm.model_executor.models.expert_widths import BuiltByLayerWidth


class Glm4MoE(BuiltByLayerWidth, upstream.Glm4MoE):
    """A MoE layer with its own number of routed experts."""


extend(__name__, upstream)
