# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""One decoder layer or draft layer of a checkpoint, with its weights in memory.

Shapes: B sequences, T tokens each, H hidden, E routed experts, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exl3.format.names import PROJECTION_OF, PROJECTIONS
from exl3.model.experts import RoutedExperts
from exl3.model.skeleton import Skeleton
from exl3.model.tensors import TensorSource


class StreamedLayer:
    """A decoder layer.

    Attributes:
        index: Its global index.
        name: The name that its tensors begin with: `model.layers.3`.
        is_draft: Whether it is a draft layer's.
        module: The layer of transformers, in float32.
        moe: Its routed experts; None in a dense layer.
    """

    is_draft = False

    def __init__(
        self, skeleton: Skeleton, tensors: TensorSource, index: int, width: int
    ):
        self.index = index
        self.name = f"model.layers.{index}"
        self._skeleton = skeleton
        self.module = skeleton.layer(index, width)
        self.moe: RoutedExperts | None = None
        experts = getattr(self.module.mlp, "experts", None)
        if experts is not None:
            name = f"{self.name}.mlp.experts"
            self.moe = _experts(tensors, name, width, experts)
            self.module.mlp.experts = self.moe
        fill(self.module, tensors, self.name, skip="mlp.experts.")

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Maps the residual stream `[B, T, H]` to the next layer's."""
        return self._skeleton.run(self.module, hidden)

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """Linear modules by the checkpoint's names; no routed expert's."""
        return {
            f"{self.name}.{name}": module
            for name, module in self.module.named_modules()
            if isinstance(module, nn.Linear)
        }

    @property
    def gate(self) -> tuple[Tensor, Tensor | None]:
        """The router's weight `[E, H]`, and the bias by which it chooses `[E]`."""
        gate = self.module.mlp.gate
        return gate.weight, getattr(gate, "e_score_correction_bias", None)

    def free(self) -> None:
        """Lets go of the weights, whoever still holds the layer."""
        self.module.to("meta")


class Head:
    """A norm and the matrix that gives logits."""

    def __init__(
        self, skeleton: Skeleton, tensors: TensorSource, norm: str, own: str = "lm_head"
    ):
        """Reads it.

        Args:
            skeleton: Of the model.
            tensors: Where it is stored.
            norm: The norm's name.
            own: The matrix's name. A draft that has none uses the trunk's.
        """
        self.norm = skeleton.norm()
        fill(self.norm, tensors, norm)
        config = skeleton.config
        trunk = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        has_own = own != "lm_head" and tensors.has_module(own)
        shape = (config.vocab_size, config.hidden_size)
        self.weight = tensors.dense(own if has_own else trunk, shape).float()

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits `[..., V]` of hidden states `[..., H]`."""
        return F.linear(self.norm(hidden), self.weight)


class DraftLayer(StreamedLayer):
    """A layer of multi-token prediction (MTP).

    At position p it reads the hidden state of p and the embedding of token p + 1, and
    predicts token p + 2. The embedding at position 0 is masked, as in the server.

    Attributes:
        eh_proj: Joins the embedding and the hidden state `[H, 2 H]`.
    """

    is_draft = True

    def __init__(
        self,
        skeleton: Skeleton,
        tensors: TensorSource,
        index: int,
        width: int,
        *,
        previous_norm: str,
    ):
        super().__init__(skeleton, tensors, index, width)
        hidden = skeleton.config.hidden_size
        with torch.device("meta"):
            self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        fill(self.eh_proj, tensors, f"{self.name}.eh_proj")
        self._norms = nn.ModuleDict()
        for part, name in (
            ("enorm", f"{self.name}.enorm"),
            ("hnorm", f"{self.name}.hnorm"),
            ("previous", previous_norm),
        ):
            self._norms[part] = skeleton.norm()
            fill(self._norms[part], tensors, name)
        own = f"{self.name}.embed_tokens"
        module = own if tensors.has_module(own) else "model.embed_tokens"
        self._embedding = tensors.floating(f"{module}.weight")
        self.head = Head(
            skeleton,
            tensors,
            f"{self.name}.shared_head.norm",
            f"{self.name}.shared_head.head",
        )

    @torch.no_grad()
    def __call__(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        """The layer's hidden states `[B, T, H]`, for `head`.

        Args:
            hidden: What the layer before gave `[B, T, H]`: the last decoder layer, or
                the draft layer before this one.
            next_tokens: The token after each position `[B, T]`.
        """
        embedded = self._embedding[next_tokens].float()
        embedded[:, 0] = 0
        joined = torch.cat(
            [
                self._norms["enorm"](embedded),
                self._norms["hnorm"](self._norms["previous"](hidden)),
            ],
            dim=-1,
        )
        return super().__call__(self.eh_proj(joined))

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """Linear modules by the checkpoint's names, `eh_proj` among them."""
        return {**super().linears, f"{self.name}.eh_proj": self.eh_proj}


@torch.no_grad()
def fill(
    module: nn.Module, tensors: TensorSource, prefix: str, skip: str | None = None
) -> None:
    """Gives a module on the meta device its weights, in float32.

    Args:
        module: The module.
        tensors: Where its weights are stored.
        prefix: The module's name.
        skip: What names of parameters begin with that have their weights already.
    """
    state = {}
    for name, place in module.state_dict().items():
        if skip is not None and name.startswith(skip):
            continue
        owner, _, field = f"{prefix}.{name}".rpartition(".")
        if field == "weight":
            stored = tensors.dense(owner, place.shape)
        else:
            stored = tensors.floating(f"{owner}.{field}", place.shape)
        state[name] = stored.to(torch.float32, copy=True)
    module.load_state_dict(state, strict=False, assign=True)
    module.requires_grad_(False)


def _experts(
    tensors: TensorSource, name: str, width: int, like: nn.Module
) -> RoutedExperts:
    """Reads the routed experts of a layer, in place of those of transformers."""
    hidden, inner = like.hidden_dim, like.intermediate_dim
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    weights: dict[str, list[Tensor]] = {projection: [] for projection in PROJECTIONS}
    spellings = _spellings(tensors, name)
    for expert in range(width):
        for projection, shape in shapes.items():
            module = f"{name}.{expert}.{spellings[projection]}"
            stored = tensors.dense(module, shape)
            weights[projection].append(stored.clone())
    return RoutedExperts(weights["gate"], weights["up"], weights["down"], like.act_fn)


def _spellings(tensors: TensorSource, name: str) -> dict[str, str]:
    """How a layer's names spell its projections: gate_proj or w1, ..."""
    found = {}
    for spelling, projection in PROJECTION_OF.items():
        module = f"{name}.0.{spelling}"
        is_there = tensors.has_module(module) or tensors.has_module(f"{module}.rank0")
        if projection not in found or is_there:
            found[projection] = spelling
    return found
