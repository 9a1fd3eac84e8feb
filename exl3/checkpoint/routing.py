# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How a router chooses, and so how many experts a layer must have at least.

Grouped routing picks `topk_group` of `n_group` groups, by the sum of each group's two
best scores where a correction bias is used, and the experts from these (DeepSeek-V3
report, section 2.1.2). A group is a run of experts by index, all of one size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from exl3.checkpoint.layers import count_field
from exl3.format.errors import CheckpointError


class Routing(NamedTuple):
    """What the routers of a model have in common."""

    top_k: int  # experts that a token goes to
    groups: int = 1
    top_groups: int = 1  # groups that these experts come from
    biased: bool = False  # a correction bias takes part in the choice

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, biased: bool) -> "Routing":
        """Reads `num_experts_per_tok`, `n_group` and `topk_group`.

        Args:
            config: The text model's config.
            biased: Whether the checkpoint stores a correction bias.

        Raises:
            CheckpointError: A field is no count, or they contradict each other.
        """
        groups = count_field(config, "n_group", 1)
        top_groups = count_field(config, "topk_group", groups)
        if config.get("topk_group") == 0 and groups > 1:
            raise CheckpointError(
                f"config.json: topk_group is 0 and n_group {groups}, so that a router "
                "chooses no group; set topk_group, or set both to 1"
            )
        if top_groups > groups:
            raise CheckpointError(
                f"config.json: topk_group {top_groups} is more than n_group {groups}; "
                "a router cannot choose more groups than there are"
            )
        field = "num_experts_per_tok"
        return cls(
            top_k=0 if config.get(field) == 0 else count_field(config, field, 1),
            groups=groups,
            top_groups=top_groups,
            # GLM-4's configs name no method, and its routers have a bias all the same.
            biased=biased or config.get("topk_method") == "noaux_tc",
        )

    @property
    def least_width(self) -> int:
        """The fewest experts that leave the router its choice."""
        if self.groups == 1:
            return self.top_k
        size = -(-self.top_k // self.top_groups)
        return self.groups * max(2 if self.biased else 1, size)
