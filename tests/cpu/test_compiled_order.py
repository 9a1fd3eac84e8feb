# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A compiled router reads its logits after they are written."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm import _custom_ops as ops

HIDDEN, EXPERTS, LAYERS = 256, 8, 2
SEED = 1


quantized_or_not = pytest.mark.parametrize(
    "quantized", [False, True], ids=["dense", "int8"]
)


class Routers(torch.nn.Module):
    """MoE layers whose routers share a bias, as Inductor likes to fuse them."""

    def __init__(self, quantized):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        gate = torch.randn(EXPERTS, HIDDEN, generator=generator)
        self.quantized = quantized
        if quantized:
            # The packed weight has only the address of its scale.
            self.scale = gate.abs().max().reshape(1) / 127
            weight = (gate / self.scale).round().to(torch.int8).T
            self.gate = ops.create_onednn_scaled_mm(
                weight, self.scale, torch.float32, True, False, 32
            )
            gate = weight.T * self.scale
        else:
            self.gate = ops.create_onednn_mm(gate.T, 32)
        self.weight = gate
        self.bias = torch.randn(EXPERTS, generator=generator)
        self.expert = torch.randn(HIDDEN, HIDDEN, generator=generator) / 16

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        if not self.quantized:
            return ops.onednn_mm(self.gate, y, None)
        quantized, scale, zero_point = ops.onednn_scaled_int8_quant(y)
        out = torch.empty((y.shape[0], EXPERTS), dtype=y.dtype)
        ops.onednn_scaled_mm(self.gate, quantized, out, scale, zero_point, None, None)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            y = torch.nn.functional.rms_norm(x, (HIDDEN,))
            scores = self.logits(y).sigmoid()
            chosen = (scores + self.bias).topk(2, -1)[1]
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
            x = x + (y @ self.expert) * (weights * (1 + chosen)).sum(-1, keepdim=True)
        return x


@quantized_or_not
def test_a_router_gives_the_product_with_its_weight(quantized):
    """Else what is compared below could be nonsense on both sides."""
    routers = Routers(quantized)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for tokens in (9, 1, 33):
            x = torch.randn(tokens, HIDDEN, generator=generator)
            # Rounding to int8 errs by half a step, of 1/127 of a row's greatest value.
            step = x.abs().amax(-1, keepdim=True) / 127 if quantized else 1e-5
            bound = step / 2 * routers.weight.abs().sum(-1)
            error = (routers.logits(x) - x @ routers.weight.T).abs()
            assert (error <= bound + 1e-4).all()


@quantized_or_not
def test_a_compiled_router_gives_what_it_gives_eagerly(quantized):
    routers = Routers(quantized)
    compiled = torch.compile(routers, dynamic=True)
    # What differs in its last bit may be rounded to another int8.
    near = 1e-2 if quantized else 1e-4
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for tokens in (9, 1, 33):
            x = torch.randn(tokens, HIDDEN, generator=generator)
            # Unwritten memory is most often zeros or an earlier result; a few runs
            # with new inputs cannot all be right by chance.
            torch.testing.assert_close(compiled(x), routers(x), rtol=near, atol=near)


def test_a_packed_weight_is_freed_while_a_graph_is_traced():
    freed = []
    handler = ops.create_onednn_mm(torch.randn(HIDDEN, EXPERTS), 32)
    address = handler.handler_tensor.item()
    release = handler.dtor
    handler.dtor = lambda pointer: (freed.append(pointer), release(pointer))
    with FakeTensorMode():
        del handler
        gc.collect()
    assert freed == [address]


def test_what_only_stands_for_a_packed_weight_frees_nothing():
    handler = ops.CPUDNNLGEMMHandler()
    freed = []
    handler.dtor = freed.append
    with FakeTensorMode():
        handler.handler_tensor = torch.zeros((), dtype=torch.int64)
    del handler
    gc.collect()
    assert not freed


def test_the_end_of_a_process_prints_nothing(monkeypatch):
    """Python has set a module's names to None when it ends what is left."""
    handler = ops.create_onednn_mm(torch.randn(HIDDEN, EXPERTS), 32)
    freed = []
    release = handler.dtor
    handler.dtor = freed.append
    names = type(handler).__del__.__globals__
    monkeypatch.setitem(names, "FakeTensor", None)
    monkeypatch.setitem(names, "_disable_current_modes", None)
    handler.__del__()
    handler.dtor = release
    assert not freed
