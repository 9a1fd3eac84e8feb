# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 inspect` counts the bytes that the layers of each rank really allocate."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from exl3.checkpoint.plan import survey
from exl3.checkpoint.problems import Problems
from exl3.tools.inspect.weights import RankWeights, Weights, expert_bytes
from tests.header_files import dense, experts, linear, write_folder
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.exl3.config import Exl3Config
from vllm.model_executor.layers.quantization.exl3.experts import Exl3ExpertsMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 256, 8, 2, 64, 384, 300
CONFIG = {
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
}
LAYER = "model.layers.0"


def num_bytes(layer: nn.Module) -> int:
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("is_exl3", [True, False])
def test_linear_layers_and_vocabularies(as_rank, tmp_path, size, is_exl3):
    """Sizes that ranks cut inside blocks, shared heads, and a padded vocabulary."""
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    shapes = {
        f"{attention}.q_proj": (HIDDEN, HEADS * HEAD),
        f"{attention}.k_proj": (HIDDEN, KV_HEADS * HEAD),
        f"{attention}.v_proj": (HIDDEN, KV_HEADS * HEAD),
        f"{attention}.o_proj": (HEADS * HEAD, HIDDEN),
        f"{attention}.q_a_proj": (HIDDEN, 128),
        f"{attention}.kv_b_proj": (128, 512),
        f"{mlp}.gate_proj": (HIDDEN, INNER),
        f"{mlp}.up_proj": (HIDDEN, INNER),
        f"{mlp}.down_proj": (INNER, HIDDEN),
    }
    make = linear if is_exl3 else dense
    tensors = dense("model.embed_tokens", HIDDEN, VOCABULARY)
    tensors |= linear("lm_head", HIDDEN, 384, 6)
    for at, (module, shape) in enumerate(shapes.items()):
        tensors |= make(module, *shape, **({"bits": 3 + at % 4} if is_exl3 else {}))
    found = survey(write_folder(tmp_path, tensors, CONFIG), CONFIG, Problems())
    config = Exl3Config(found.checkpoint.plan)

    def of_rank(rank: int) -> int:
        as_rank(rank, size)

        def made(kind, name, *sizes, **more):
            layer = kind(*sizes, bias=False, quant_config=config, prefix=name, **more)
            return num_bytes(layer)

        total = made(
            QKVParallelLinear, f"{attention}.qkv_proj", HIDDEN, HEAD, HEADS, KV_HEADS
        )
        total += made(RowParallelLinear, f"{attention}.o_proj", HEADS * HEAD, HIDDEN)
        total += made(ReplicatedLinear, f"{attention}.q_a_proj", HIDDEN, 128)
        total += made(ColumnParallelLinear, f"{attention}.kv_b_proj", 128, 512)
        total += made(
            MergedColumnParallelLinear, f"{mlp}.gate_up_proj", HIDDEN, [INNER, INNER]
        )
        total += made(RowParallelLinear, f"{mlp}.down_proj", INNER, HIDDEN)
        total += num_bytes(
            ParallelLMHead(VOCABULARY, HIDDEN, quant_config=config, prefix="lm_head")
        )
        return total + num_bytes(VocabParallelEmbedding(VOCABULARY, HIDDEN))

    torch.set_default_dtype(torch.bfloat16)
    try:
        held = max(of_rank(rank) for rank in range(size))
    finally:
        torch.set_default_dtype(torch.float32)
    # MLA decodes kv_b_proj once more.
    held += 2 * 128 * 512 // size if is_exl3 else 0
    assert RankWeights(found, CONFIG).on(size) == Weights(held, 0)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [None, 2, 4])
def test_routed_experts(tmp_path, ranks, size):
    tensors = experts(
        LAYER,
        5,
        intermediate=1024,
        ranks=ranks,
        bits=lambda expert, at: 1 + (expert + 3 * at) % 8,
    )
    found = survey(write_folder(tmp_path, tensors), {}, Problems())
    name = f"{LAYER}.mlp.experts"
    stored = found.checkpoint.plan.experts[name]
    for rank in {0, size - 1}:
        moe = SimpleNamespace(
            moe_parallel_config=SimpleNamespace(
                tp_size=size, tp_rank=rank, enable_eplb=False
            ),
            intermediate_size=1024,
            has_bias=False,
            is_lora_enabled=False,
        )
        layer = nn.Module()
        layer.layer_name, layer.global_num_experts = name, 5
        layer.activation, layer.expert_map = MoEActivation.SILU, None
        layer.swiglu_limit = layer.swiglu_alpha = layer.swiglu_beta = None
        layer.apply_router_weight_on_input = False
        layer.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
        layer._map_global_expert_id_to_local_expert_id = lambda expert: expert
        method = Exl3ExpertsMethod(moe, name, stored)
        method.create_weights(layer, 5, 256, 1024 // size, torch.bfloat16)
        assert num_bytes(layer) == expert_bytes(stored, name, size)
