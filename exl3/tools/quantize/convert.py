# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Encodes a checkpoint, one layer after another.

With a text, the layer is first run over it, in the weights of the source; the inputs
that its linear layers and experts get there weigh the errors of the encoding.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exl3.checkpoint.file_header import TensorHeader
from exl3.format.names import PROJECTIONS
from exl3.model import TensorSource
from exl3.tools.quantize.calibrate import ExpertInputs, LayerInputs
from exl3.tools.quantize.encode import (
    Encoded,
    Job,
    encode,
    is_out_of_memory,
    padded_bias,
    slice_job,
)
from exl3.tools.quantize.plan import Experts, Linear, Part
from exl3.tools.quantize.recipe import Bits, Recipe
from exl3.tools.quantize.text import Text
from exl3.tools.quantize.workers import Workers
from exl3.tools.shared.errors import ToolError
from exl3.tools.shared.staging import StagedCheckpoint

#: What the matrices that are at work together may take beyond half a layer, in bytes.
_LEAST_ROOM = 1 << 28
#: float32 matrices as large as a Hessian that are in memory while one is factored.
_HESSIAN_COPIES = 5


@dataclass
class Figures:
    """What became of the weights of one kind: "expert", "linear" or "head"."""

    weights: int = 0  # stored ones
    bits: float = 0.0  # of all of them together
    error: float = 0.0  # sum of the matrices' relative errors
    matrices: int = 0

    def add(self, encoded: Encoded) -> None:
        """Counts a matrix."""
        self.weights += encoded.num_weights
        self.bits += encoded.num_weights * encoded.bits
        self.error += encoded.error
        self.matrices += 1


class Converter:
    """Encodes the parts of a checkpoint into a staged one.

    Args:
        tensors: The source's tensors.
        parts: What becomes of them.
        recipe: What is asked for.
        bits: Bits of every routed expert to encode, by global layer index.
        workers: Do the work.
        seed: Decides the random signs.
        bar: Progress, in weights.
    """

    def __init__(
        self,
        tensors: TensorSource,
        parts: Sequence[Part],
        recipe: Recipe,
        bits: Mapping[int, list[Bits]],
        workers: Workers,
        seed: int,
        bar: Any,
    ):
        self.tensors = tensors
        self.parts = parts
        self.recipe = recipe
        self.bits = bits
        self.workers = workers
        self.seed = seed
        self._bar = bar
        self._lock = threading.Lock()

    def run(self, out: StagedCheckpoint, text: Text | None) -> None:
        """Encodes every part that is not done.

        Raises:
            CheckpointError: A layer cannot be run.
            ToolError: A weight cannot be encoded.
        """
        todo = [part for part in self.parts if not out.has(part.name)]
        layers = {part.layer: part for part in todo if part.layer is not None}
        if text is not None:
            state = out.read_state() if len(todo) < len(self.parts) else None
            if state is None:
                text.start()
            else:
                text.restore(state)
            for layer in text.layers(min(layers, default=0)) if layers else ():
                part = layers.pop(layer.index, None) or Part("", layer.index)
                inputs = text.run(
                    layer,
                    self.workers,
                    linears={linear.module for linear in part.linears},
                    keep_experts=part.experts is not None,
                )
                layer.free()
                if part.name:
                    self._write(part, inputs, out, text.state())
        for part in layers.values():  # no text, or the model has no such layer
            self._write(part, LayerInputs(), out)
        for part in todo:
            if part.layer is None:
                inputs = LayerInputs()
                if text is not None and part.linears:
                    hessian = text.head_hessian(self.workers)
                    inputs.hessians = {at.module: hessian for at in part.linears}
                self._write(part, inputs, out)

    def _write(
        self,
        part: Part,
        inputs: LayerInputs,
        out: StagedCheckpoint,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        figures: dict[str, Figures] = {}
        self._bar.set_postfix_str(part.name)
        stored = {at.name: self.tensors.read(at.name) for at in part.kept}
        for works in self._linears(part, inputs), self._experts(part, inputs):
            at_once = _at_once(part, works)
            for encoded in self.workers.lead(self._encode, works, at_once):
                stored |= encoded.tensors
                for each in encoded.matrices:
                    stored |= each.tensors
                    figures.setdefault(encoded.kind, Figures()).add(each)
        note = {kind: vars(of) for kind, of in figures.items()}
        out.write_shard(part.name, stored, note, state)
        self.tensors.release()

    def _linears(self, part: Part, inputs: LayerInputs) -> list["_Work"]:
        kind = "head" if part.layer is None else "linear"
        return [_Work(kind, linear, inputs) for linear in part.linears]

    def _experts(self, part: Part, inputs: LayerInputs) -> list["_Work"]:
        if part.experts is None:
            return []
        experts = range(part.experts.width)
        return [_Work("expert", _Expert(part, expert), inputs) for expert in experts]

    def _encode(self, work: "_Work") -> "_Encoded":
        """Encodes a linear layer, or the matrices of an expert."""
        self.workers.check()
        what = work.what
        try:
            if isinstance(what, Linear):
                tensors, jobs = self._linear_jobs(what, work.inputs)
            else:
                tensors, jobs = {}, self._expert_jobs(what, work.inputs.experts)
            matrices = [self._encode_job(job) for job in jobs]
            return _Encoded(work.kind, tensors, matrices)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise ToolError(
                f"{what.module}: there is not enough memory to encode it; use fewer "
                "--threads or --tokens, or a machine with more"
            ) from error

    def _encode_job(self, job: Job) -> Encoded:
        return encode(job, self.seed, progress=self._advance, run=self.workers.map)

    def _advance(self, weights: int) -> None:
        self.workers.check()
        with self._lock:
            self._bar.update(weights)

    def _linear_jobs(
        self, linear: Linear, inputs: LayerInputs
    ) -> tuple[dict[str, Tensor], Iterable[Job]]:
        hessian = inputs.hessians.get(linear.module)
        job = Job(
            linear.module,
            self._weight(linear.weight),
            None if hessian is None else hessian.mean(),
            linear.bits,
            self.recipe.codebook,
        )
        if linear.bias is None:
            return {}, [job]
        bias = padded_bias(self._weight(linear.bias), linear.module)
        return {linear.bias.name: bias}, [job]

    def _expert_jobs(
        self, what: "_Expert", inputs: ExpertInputs | None
    ) -> Iterator[Job]:
        weights = {
            projection: self._weight(what.headers[projection])
            for projection in PROJECTIONS
        }
        outer = inner = None
        if inputs is not None:
            outer, inner = inputs.moments(what.expert, weights["gate"], weights["up"])
        bits = self.bits[what.layer][what.expert]
        for projection, weight in weights.items():
            module = what.headers[projection].name.removesuffix(".weight")
            hessian = inner if projection == "down" else outer
            job = Job(module, weight, hessian, bits, self.recipe.codebook)
            if self.recipe.ranks is None:
                yield job
            else:
                cut = projection != "down"
                yield from slice_job(job, self.recipe.ranks, by_output=cut)

    def _weight(self, header: TensorHeader) -> Tensor:
        with self._lock:  # files open when they are first read
            return self.tensors.floating(header.name)


@dataclass(frozen=True)
class _Work:
    """What one thread encodes after the other: matrices that share moments."""

    kind: str
    what: "Linear | _Expert"
    inputs: LayerInputs

    @property
    def num_bytes(self) -> int:
        """What it takes in memory at most: a matrix, its moments and their factor."""
        what = self.what
        weights = [what.weight] if isinstance(what, Linear) else what.headers.values()
        return 4 * max(
            _HESSIAN_COPIES * k * k + 4 * n * k for n, k in (at.shape for at in weights)
        )


@dataclass(frozen=True)
class _Encoded:
    """What became of it."""

    kind: str
    tensors: dict[str, Tensor]  # besides those of the matrices
    matrices: list[Encoded]


def _at_once(part: Part, works: Sequence[_Work]) -> int:
    """How many matrices may be at work together, in half the memory of the layer."""
    room = max(_LEAST_ROOM, part.num_bytes // 2)
    return room // max((work.num_bytes for work in works), default=1)


class _Expert:
    """One routed expert."""

    def __init__(self, part: Part, expert: int):
        assert isinstance(part.experts, Experts) and part.layer is not None
        self.layer = part.layer
        self.expert = expert
        self.headers = part.experts.weights[expert]
        self.module = f"{part.experts.name}.{expert}"
