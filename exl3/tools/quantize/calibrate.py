# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs text through one layer, and keeps what the encoder needs to know of it.

Shapes: T tokens of a window, H hidden, n tokens of one expert.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exl3.model import StreamedLayer
from exl3.tools.quantize.hessian import Hessian
from exl3.tools.quantize.workers import Workers

#: Windows of text whose inputs are in memory together, before they are summed.
WAVE = 16


class NotFiniteError(ArithmeticError):
    """A layer gives infinities or NaN."""


@dataclass
class ExpertInputs:
    """The inputs of a layer's routed experts.

    The moments of all experts would not fit into memory, 38 GB for 256 experts of 6,144
    features. So the inputs are kept, once for all experts, and each expert's moments
    are made of them when it is encoded.

    Attributes:
        activation: Of the experts' gates.
        windows: The inputs `[T, H]` of each window.
        rows: By expert: window, rows of its tokens `[n]`, router's weights `[n]`.
    """

    activation: Callable[[Tensor], Tensor]
    windows: list[Tensor] = field(default_factory=list)
    rows: dict[int, list[tuple[int, Tensor, Tensor]]] = field(default_factory=dict)

    def moments(
        self, expert: int, gate: Tensor, up: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Second moments of what an expert reads, and of what its `down_proj` does.

        A row counts by the router's weight, which the expert's output is times.

        Args:
            expert: The expert.
            gate: Its weight `[I, H]`.
            up: Its weight `[I, H]`.
        """
        outer, inner = Hessian(gate.shape[1]), Hessian(gate.shape[0])
        gate, up = gate.float(), up.float()
        for window, tokens, weight in self.rows.get(expert, ()):
            x = self.windows[window][tokens]
            outer.add(x, weight)
            inner.add(self.activation(F.linear(x, gate)) * F.linear(x, up), weight)
        return outer.mean(), inner.mean()


@dataclass
class LayerInputs:
    """What the text says of one layer.

    Attributes:
        hessians: Second moments of the inputs of each watched linear layer. Layers that
            read the same share them.
        experts: The inputs of the routed experts, if these are watched.
        sensitivities: By expert: the squared size of what it adds to the residual
            stream, as a share of the stream's own, summed over tokens.
    """

    hessians: dict[str, Hessian] = field(default_factory=dict)
    experts: ExpertInputs | None = None
    sensitivities: list[float] = field(default_factory=list)


def run_layer(
    layer: StreamedLayer,
    hidden: list[Tensor],
    following: list[Tensor],
    workers: Workers,
    linears: Collection[str] = (),
    keep_experts: bool = False,
) -> LayerInputs:
    """Takes the hidden states of all windows through a layer.

    Args:
        layer: The layer.
        hidden: Hidden states `[1, T, H]` of each window; replaced by the layer's.
        following: For a draft layer: the token after each position, `[1, T]` a window.
        workers: Run the windows.
        linears: Names of the linear layers to watch.
        keep_experts: Whether to keep the inputs of the routed experts.

    Raises:
        NotFiniteError: The layer's outputs are not finite.
    """
    found = LayerInputs(sensitivities=[0.0] * len(layer.moe or ()))
    if keep_experts and layer.moe is not None:
        found.experts = ExpertInputs(layer.moe.activation)

    def run(window: int) -> _Seen:
        following_of = following[window : window + 1]  # none in a decoder layer
        with watch.window() as seen:
            hidden[window] = layer(hidden[window], *following_of)
        if not hidden[window].isfinite().all():
            raise NotFiniteError(layer.name)
        seen.measure(hidden[window])
        return seen

    with _Watch(layer, linears, keep_experts) as watch:
        for first in range(0, len(hidden), WAVE):
            windows = range(first, min(first + WAVE, len(hidden)))
            seen = workers.map(run, windows)
            _add_linears(found.hessians, seen, workers)
            for window, of in zip(windows, seen):
                for expert, share in sorted(of.shares.items()):
                    found.sensitivities[expert] += share
                if found.experts is None:
                    continue
                found.experts.windows.append(of.expert_inputs)
                for expert, (tokens, weight) in sorted(of.rows.items()):
                    rows = found.experts.rows.setdefault(expert, [])
                    rows.append((window, tokens, weight))
    return found


def _add_linears(
    hessians: dict[str, Hessian], seen: "list[_Seen]", workers: Workers
) -> None:
    """Adds the inputs of a wave of windows."""
    first: dict[int, str] = {}  # the layer that is the first to read a tensor
    for name, x in seen[0].inputs.items():
        leader = first.setdefault(id(x), name)
        if name not in hessians:
            known = Hessian(x.shape[-1]) if leader == name else hessians[leader]
            hessians[name] = known
    for name in first.values():
        inputs = [of.inputs[name].flatten(0, -2) for of in seen]
        hessians[name].add(torch.cat(inputs), run=workers.map)


class _Seen:
    """What passes through a layer for one window."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.expert_inputs = torch.empty(0)
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.shares: dict[int, float] = {}
        self._added: dict[int, tuple[Tensor, Tensor]] = {}

    def add_expert(
        self, expert: int, tokens: Tensor, weight: Tensor, out: Tensor
    ) -> None:
        self.rows[expert] = tokens, weight
        squared = (out * weight.unsqueeze(-1)).square().sum(-1)
        self._added[expert] = tokens, squared

    def measure(self, stream: Tensor) -> None:
        """Sets `shares`, by the residual stream `[1, T, H]` behind the layer."""
        size = stream[0].square().sum(-1)
        for expert, (tokens, squared) in self._added.items():
            self.shares[expert] = (squared / size[tokens]).sum().item()


class _Watch:
    """Looks on while threads run windows through a layer."""

    def __init__(
        self, layer: StreamedLayer, linears: Collection[str], keep_experts: bool
    ):
        self._moe = layer.moe
        self._modules = {
            name: module for name, module in layer.linears.items() if name in linears
        }
        self._keep_experts = keep_experts
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._here = threading.local()

    def __enter__(self) -> "_Watch":
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_pre_hook(self._reader(name)))
        if self._moe is not None:
            if self._keep_experts:
                hook = self._moe.register_forward_pre_hook(self._keep)
                self._hooks.append(hook)
            self._moe.observer = self._observe
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._moe is not None:
            self._moe.observer = None

    @contextmanager
    def window(self) -> Iterator[_Seen]:
        """Collects what this thread's next window shows."""
        self._here.seen = _Seen()
        yield self._here.seen

    def _reader(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._here.seen.inputs[name] = inputs[0]

        return before

    def _keep(self, _moe: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._here.seen.expert_inputs = inputs[0]

    def _observe(
        self,
        expert: int,
        tokens: Tensor,
        x: Tensor,
        weight: Tensor,
        inner: Tensor,
        out: Tensor,
    ) -> None:
        self._here.seen.add_expert(expert, tokens, weight, out)
