# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Where each tensor of a checkpoint goes: to a layer, on to the model, or nowhere."""

import pytest
import torch
from torch import nn

from exl3.checkpoint.plan import CheckpointPlan
from exl3.format.errors import TensorError
from tests.exl3_layers import error_bound, make_layer, relative_error
from tests.exl3_stored import planned, stored_tensors
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.quantization.exl3.config import Exl3Config
from vllm.model_executor.layers.quantization.exl3.loading import load_exl3_tensors

BLOCK = "model.layers.3"
#: The parameters that tensors of another name fill.
FILLED = {
    f"{BLOCK}.mlp.gate.weight": f"{BLOCK}.mtp_block.gate.weight",
    f"{BLOCK}.self_attn.indexer.wk.weight": f"{BLOCK}.mtp_block.indexer.weight",
}


class Draft(nn.Module):
    """A draft's block: an EXL3 layer, and modules that upstream builds dense."""

    def __init__(self, config):
        super().__init__()
        self.model = nn.Module()
        layer = nn.Module()
        self.model.layers = nn.ModuleDict({"3": layer})
        layer.eh_proj = nn.Linear(512, 256, bias=False)
        layer.mtp_block = block = nn.Module()
        block.mlp = MergedColumnParallelLinear(
            256,
            [128, 128],
            bias=False,
            quant_config=config,
            prefix=f"{BLOCK}.mlp.gate_up_proj",
        )
        block.gate = ReplicatedLinear(
            256, 6, bias=False, quant_config=None, prefix=f"{BLOCK}.mlp.gate"
        )
        block.indexer = MergedColumnParallelLinear(
            256,
            [64, 4],
            bias=False,
            quant_config=None,
            disable_tp=True,
            prefix=f"{BLOCK}.self_attn.indexer.wk_weights_proj",
        )
        self.received = {}

    def load_weights(self, weights):
        for name, tensor in weights:
            assert name not in self.received
            self.received[name] = tensor.clone()
        # As upstream's do: the parameters that were filled, by the model's names.
        return {FILLED.get(name, name) for name in self.received}


@pytest.fixture
def stored(rng):
    """EXL3 modules of the draft, and one of the trunk, which the draft is not."""
    shapes = {
        "model.layers.0.self_attn.o_proj": (256, 256),
        f"{BLOCK}.mlp.gate_proj": (256, 128),
        f"{BLOCK}.mlp.up_proj": (256, 128),
        f"{BLOCK}.mlp.gate": (256, 128),
        f"{BLOCK}.eh_proj": (512, 256),
        f"{BLOCK}.self_attn.indexer.wk": (256, 128),
        f"{BLOCK}.self_attn.indexer.weights_proj": (256, 128),
    }
    return {name: make_layer(rng, *shape, 64, 1) for name, shape in shapes.items()}


@pytest.fixture
def model(as_rank, stored):
    linears = {name: planned(layer) for name, layer in stored.items()}
    config = Exl3Config(CheckpointPlan(linears=linears))
    model = Draft(config)
    load_exl3_tensors(model, config)
    return model


def stream(stored):
    """Every tensor of the checkpoint, in one buffer that is used again and again."""
    for name, layer in stored.items():
        for field, tensor in stored_tensors(layer).items():
            buffer = tensor.clone()
            yield f"{name}.{field}", buffer
            buffer.fill_(0)
    yield f"{BLOCK}.enorm.weight", torch.ones(256)
    yield f"{BLOCK}.mlp.gate.e_score_correction_bias", torch.ones(6)


def test_modules_that_are_built_dense_get_their_weight(model, stored):
    model.load_weights(stream(stored))
    sizes = {
        f"{BLOCK}.mlp.gate": 6,
        f"{BLOCK}.eh_proj": 256,
        f"{BLOCK}.self_attn.indexer.wk": 64,
        f"{BLOCK}.self_attn.indexer.weights_proj": 4,
    }
    dense = {f"{BLOCK}.enorm.weight", f"{BLOCK}.mlp.gate.e_score_correction_bias"}
    assert set(model.received) == {f"{name}.weight" for name in sizes} | dense
    bound = error_bound(torch.float32, exact=False)
    for name, size in sizes.items():
        weight = model.received[f"{name}.weight"]
        assert weight.shape == (size, stored[name].in_features)
        assert relative_error(weight.T, stored[name].weight()[:, :size]) < bound


def test_a_layer_is_filled_and_its_model_sees_nothing_of_it(model, stored, rng):
    loaded = model.load_weights(stream(stored))
    assert not any("gate_proj" in name for name in loaded)
    layer = model.model.layers["3"].mtp_block.mlp
    x = torch.from_numpy(rng.standard_normal((2, 256))).float()
    got = layer.quant_method.apply(layer, x)
    wanted = x.double().numpy() @ stored[f"{BLOCK}.mlp.up_proj"].weight()
    bound = error_bound(torch.float32, exact=False)
    assert relative_error(got[:, 128:], wanted) < bound


def test_a_model_can_be_loaded_again(model, stored):
    model.load_weights(stream(stored))
    model.received.clear()
    model.load_weights(stream(stored))


def test_dense_weights_that_a_trellis_replaced_are_dropped(model, stored):
    def weights():
        yield from stream(stored)
        yield f"{BLOCK}.mlp.up_proj.weight", torch.ones(128, 256)
        yield f"{BLOCK}.mlp.up_proj.weight_scale_inv", torch.ones(1)
        yield f"{BLOCK}.mlp.up_proj.input_scale", torch.ones(1)
        yield f"{BLOCK}.eh_proj.weight", torch.ones(256, 512)

    model.load_weights(weights())
    assert not any("up_proj" in name for name in model.received)
    assert not (model.received[f"{BLOCK}.eh_proj.weight"] == 1).all()


def test_what_else_a_module_has_reaches_the_model(model, stored):
    name = f"{BLOCK}.mlp.up_proj.k_scale"

    def weights():
        yield from stream(stored)
        yield name, torch.ones(1)

    assert name in model.load_weights(weights())


def test_dense_experts_that_a_trellis_replaced_are_dropped(as_rank):
    experts = {"model.layers.1.mlp.experts": None}
    model = nn.Module()
    received = []
    model.load_weights = lambda weights: received.extend(name for name, _ in weights)
    load_exl3_tensors(model, Exl3Config(CheckpointPlan(experts=experts)))
    weight = torch.ones(2, 2)
    model.load_weights(
        [
            ("model.layers.1.mlp.experts.0.gate_proj.weight", weight),
            ("model.layers.1.mlp.experts.gate_up_proj", weight),
            ("model.layers.1.mlp.experts.0.gate_proj.rank1.trellis", weight),
            ("model.layers.2.mlp.experts.0.gate_proj.weight", weight),
        ]
    )
    assert received == ["model.layers.2.mlp.experts.0.gate_proj.weight"]


def test_a_doubled_tensor_is_named(model, stored):
    def weights():
        yield from stream(stored)
        yield f"{BLOCK}.mlp.up_proj.suh", torch.ones(256, dtype=torch.float16)

    with pytest.raises(TensorError, match=rf"{BLOCK}\.mlp\.up_proj\.suh: stored twice"):
        model.load_weights(weights())


@pytest.mark.parametrize("name", ["mlp.up_proj.trellis", "eh_proj.svh", "mlp.gate.mcg"])
def test_a_missing_tensor_is_named(model, stored, name):
    kept = (item for item in stream(stored) if item[0] != f"{BLOCK}.{name}")
    with pytest.raises(TensorError, match=rf"{BLOCK}\.{name}: missing"):
        model.load_weights(kept)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("name", ["norm", "embed_tokens", "shared_head.head"])
def test_a_missing_dense_tensor_is_named(as_rank, stored, name, draft):
    """Else its parameter would stay as it was allocated."""
    linears = {name: planned(layer) for name, layer in stored.items()}
    config = Exl3Config(CheckpointPlan(linears=linears))
    model = Draft(config)
    model.shared_head = nn.Module()
    model.get_submodule(name.rpartition(".")[0]).register_module(
        name.rpartition(".")[2], nn.Linear(4, 4, bias=False)
    )
    load_exl3_tensors(model, config, draft)
    if draft and name != "norm":  # the target's is taken
        model.load_weights(stream(stored))
        return
    with pytest.raises(TensorError, match=rf"^{name}\.weight: the files .* 0 others"):
        model.load_weights(stream(stored))


def test_a_missing_bias_of_a_trellis_is_named(as_rank, rng):
    stored = make_layer(rng, 128, 128, 64, 1)
    config = Exl3Config(CheckpointPlan(linears={"a": planned(stored)}))
    model = nn.Module()
    model.a = ReplicatedLinear(128, 128, bias=True, quant_config=config, prefix="a")
    model.load_weights = lambda weights: {name for name, _ in weights}
    load_exl3_tensors(model, config)
    with pytest.raises(TensorError, match=r"^a\.bias: the files that were loaded"):
        model.load_weights(
            (f"a.{field}", tensor) for field, tensor in stored_tensors(stored).items()
        )


def test_a_module_that_no_layer_would_take_is_refused(as_rank, stored, rng):
    stored = {**stored, f"{BLOCK}.mlp.other_proj": make_layer(rng, 128, 128, 64, 1)}
    linears = {name: planned(layer) for name, layer in stored.items()}
    config = Exl3Config(CheckpointPlan(linears=linears))
    model = Draft(config)
    load_exl3_tensors(model, config)
    with pytest.raises(TensorError, match=r"mlp\.other_proj: stored as EXL3, but"):
        model.load_weights(stream(stored))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bias_loses_its_padding_and_is_cut_by_upstream(as_rank, rng, rank):
    names = {"q_proj": 128, "k_proj": 128, "v_proj": 128}
    stored = {f"a.{name}": make_layer(rng, 128, n, 64, 1) for name, n in names.items()}
    linears = {name: planned(at, has_bias=True) for name, at in stored.items()}
    as_rank(rank, 2)
    config = Exl3Config(CheckpointPlan(linears=linears))
    model = nn.Module()
    model.qkv = QKVParallelLinear(
        128, 32, 2, 2, quant_config=config, bias=True, prefix="a.qkv_proj"
    )

    def load_weights(weights):
        for name, tensor in weights:
            assert name.endswith(".bias")
            model.qkv.bias.weight_loader(model.qkv.bias, tensor, name[2])

    model.load_weights = load_weights
    load_exl3_tensors(model, config)
    bias = {name: torch.arange(128).half() + 128 * i for i, name in enumerate(stored)}

    def weights():
        for name, layer in stored.items():
            for field, tensor in stored_tensors(layer).items():
                yield f"{name}.{field}", tensor
            yield f"{name}.bias", bias[name]

    model.load_weights(weights())
    wanted = [vector[32 * rank : 32 * (rank + 1)] for vector in bias.values()]
    assert torch.equal(model.qkv.bias.data, torch.cat(wanted).float())


def test_a_bias_that_the_model_lacks_is_refused(model, stored):
    name = f"{BLOCK}.mlp.up_proj.bias"
    with pytest.raises(TensorError, match=rf"{name}: the model has no bias there"):
        model.load_weights([(name, torch.zeros(128).half())])
