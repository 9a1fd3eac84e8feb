# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The quantization config: which layers are EXL3, told from the checkpoint's plan."""

from typing import TYPE_CHECKING, Any

import torch

from exl3.checkpoint.plan import CheckpointPlan
from exl3.format.errors import TensorError
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.transformers_utils.exl3 import QUANT_METHOD

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

#: What upstream's layers are made of, for models that do not say so themselves.
_FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "wk_weights_proj": ["wk", "weights_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "in_proj_ba": ["in_proj_b", "in_proj_a"],
}


class Exl3Config(QuantizationConfig):
    """What one checkpoint, a target's or a draft's, stores as EXL3.

    Attributes:
        plan: How every EXL3 module is stored.
        source: The checkpoint that the plan is of: model and revision.
    """

    def __init__(
        self,
        plan: CheckpointPlan | None = None,
        source: tuple[str, str | None] | None = None,
    ):
        super().__init__()
        self.plan = plan or CheckpointPlan()
        self.source = source
        # Names as this model spells them, and as the checkpoint does.
        self._stored = {name: name for name in (*self.plan.linears, *self.plan.experts)}

    def get_name(self) -> str:
        """The method's name in a config."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes that the ops compute in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The least compute capability of a CUDA device."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the plan is read from the tensors."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Exl3Config":
        """A config without a plan; `get_quant_config` gives it one."""
        return cls()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: "WeightsMapper") -> None:
        """Renames modules as a model does when it loads them."""
        self._stored = {
            mapped: stored
            for name, stored in self._stored.items()
            if (mapped := hf_to_vllm_mapper.map_name(name)) is not None
        }

    def parts_of(self, prefix: str) -> list[str | None]:
        """The modules that a layer is made of, in the order of its outputs.

        Args:
            prefix: The layer's name in this model.

        Returns:
            The checkpoint's name of each, or None if it is dense.
        """
        parent, dot, leaf = prefix.rpartition(".")
        # The draft's head is stored one level deeper than it is built.
        for name in (prefix, f"{parent}{dot}shared_head.{leaf}"):
            if name in self._stored:
                return [self._stored[name]]
        parts = self.packed_modules_mapping.get(leaf) or _FUSED.get(leaf, [leaf])
        return [self._stored.get(f"{parent}{dot}{part}") for part in parts]

    def stored_names(self, prefix: str) -> list[str]:
        """As `parts_of`, for a layer that runs all its modules alike.

        Returns:
            The checkpoint's names; empty if the layer is dense.

        Raises:
            TensorError: Some of the modules are EXL3, and others dense.
        """
        names = self.parts_of(prefix)
        found = [name for name in names if name is not None]
        if found and len(found) != len(names):
            raise TensorError(
                f"{', '.join(found)}: EXL3, but the rest of {prefix} is dense, and "
                "vLLM runs them as one layer; store all of them alike"
            )
        return found

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        """The method of a layer: EXL3 if its tensors are, else upstream's default."""
        # Imported late: these import the layers, which import this package.
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import (
            LinearBase,
            UnquantizedLinearMethod,
        )
        from vllm.model_executor.layers.quantization.exl3.experts import (
            Exl3ExpertsMethod,
        )
        from vllm.model_executor.layers.quantization.exl3.linear import (
            Exl3LinearMethod,
        )
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, RoutedExperts):
            stored = self._stored.get(prefix)
            if stored is None:
                return None
            return Exl3ExpertsMethod(
                layer.moe_config, stored, self.plan.experts[stored]
            )
        if isinstance(layer, LinearBase | ParallelLMHead):
            names = self.stored_names(prefix)
            if names:
                matrices = {name: self.plan.linears[name] for name in names}
                return Exl3LinearMethod(prefix, matrices)
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        return None
