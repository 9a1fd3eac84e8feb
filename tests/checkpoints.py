# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Tiny random checkpoints in the layouts that people serve.

    write_checkpoint(path, model_type="glm_moe_dsa", widths=[0, 4, 6, 5])

writes `config.json`, safetensors with their index, and a tokenizer, with the tensor
names of the real checkpoints. It needs torch and safetensors, nothing of vLLM, and
takes well under a second.

The weights are random, with norms and router biases that are not trivial, and
`lm_head` leans towards one fixed successor of every token. So greedy tokens have a
clear margin, yet every expert matters to them, and an MTP draft is often right and
often wrong.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

VOCAB_SIZE = 512
#: Widths of the published GLM-5.2 of 20 layers and 724 experts.
GLM_52 = [0, 0, 0, 56, 52, 52, 48, 40, 48, 56, 48, 48, 36, 36, 36, 36, 28, 32, 36, 36]
# Standard deviation of a token's random logits, and how far `lm_head` leans towards
# its fixed successor, in the same unit. At 9 the successor wins in about 7 of 10
# greedy steps of deepseek_v3, and the best token leads the second by 2.6 (median).
LOGIT_SPREAD = 3.0
SUCCESSOR_LEAN = 9.0

_MLA = {
    # The CPU's MLA kernel takes no other pair of these two.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "q_lora_rank": 128,
    "rope_theta": 10000.0,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 64, "rope_theta": 10000.0}
_SIGMOID_ROUTER = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_INDEXER = {"index_topk": 512, "index_n_heads": 4, "index_head_dim": 128}

# What each model type adds to the fields that all have in common.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            **_MLA,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_MLA, **_SIGMOID_ROUTER}),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        {**_MLA, **_SIGMOID_ROUTER, **_INDEXER},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        {**_MLA, **_SIGMOID_ROUTER, **_INDEXER, "indexer_rope_interleave": True},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**_MLA, **_SIGMOID_ROUTER}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            **_GQA,
            **_SIGMOID_ROUTER,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**_GQA, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
}


def write_checkpoint(
    path: str | Path,
    *,
    model_type: str = "deepseek_v3",
    widths: list[int] | None = None,
    hidden: int = 256,
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    mtp: int = 1,
    dtype: str = "bfloat16",
    seed: int = 0,
    shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """Writes a random checkpoint that vLLM and transformers can load.

    Args:
        path: The folder; made if it isn't there.
        model_type: One of deepseek_v2, deepseek_v3, deepseek_v32, glm_moe_dsa,
            glm4_moe_lite, glm4_moe and qwen3_moe.
        widths: Routed experts stored for each layer by its global index, the MTP
            layers last; dense layers hold 0. Also written to `config.json` as
            `n_routed_experts_per_layer`. None: `experts` in each MoE layer, and no
            such field.
        hidden: `hidden_size`.
        layers: `num_hidden_layers`; the first is dense unless
            `first_k_dense_replace` says otherwise.
        experts: Routed experts of each MoE layer where `widths` is None.
        top_k: `num_experts_per_tok`.
        mtp: MTP layers. The families without one ignore it.
        dtype: "bfloat16" or "float32". The router's bias is float32 in both.
        seed: The same seed gives the same bytes.
        shards: Number of safetensors files; consecutive tensors lie in different
            ones, so that a layer's tensors arrive in pieces.
        **config_overrides: Fields of `config.json`; None removes a field. They
            change shapes too (`moe_intermediate_size`), save for the widths: what
            is stored always follows `widths` and `experts`.

    Returns:
        `path`.
    """
    config = make_config(
        model_type,
        widths=widths,
        hidden=hidden,
        layers=layers,
        experts=experts,
        top_k=top_k,
        mtp=mtp,
        dtype=dtype,
        **config_overrides,
    )
    stored_widths = widths or [experts] * (layers + mtp)
    tensors = make_tensors(config, stored_widths, mtp=mtp, dtype=dtype, seed=seed)
    return save_checkpoint(path, config, tensors, shards=shards)


def make_config(
    model_type: str,
    *,
    widths: list[int] | None = None,
    hidden: int = 256,
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    mtp: int = 1,
    dtype: str = "bfloat16",
    **overrides: Any,
) -> dict[str, Any]:
    """Returns the `config.json` of `write_checkpoint` with the same arguments."""
    architecture, family = _FAMILIES[model_type]
    widest = max(widths) if widths else experts
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": top_k,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **family,
    }
    if model_type == "qwen3_moe":
        config |= {"num_experts": widest, "mlp_only_layers": [0]}
    else:
        config |= {
            "n_routed_experts": widest,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": mtp,
        }
    if widths:
        config["n_routed_experts_per_layer"] = widths
    config |= overrides
    return {field: value for field, value in config.items() if value is not None}


def make_tensors(
    config: dict[str, Any],
    widths: list[int],
    *,
    mtp: int = 1,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Tensors:
    """Returns random weights under the names of the real checkpoints.

    Args:
        config: As `make_config` returns it.
        widths: Routed experts of each layer, the MTP layers last.
        mtp: MTP layers.
        dtype: Of all tensors except the router's bias.
        seed: Of all the randomness.
    """
    draw = _Draw(seed)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    embed = draw.normal(VOCAB_SIZE, hidden)
    successor = torch.randperm(VOCAB_SIZE, generator=draw.generator)
    # A normalised hidden state has size 1 per element, so a row of norm
    # LOGIT_SPREAD gives logits of that spread, and a row along an embedding gives
    # sqrt(hidden) times its norm.
    lm_head = draw.normal(VOCAB_SIZE, hidden) / math.sqrt(hidden)
    lm_head[successor] += SUCCESSOR_LEAN * embed / hidden
    lm_head *= LOGIT_SPREAD

    tensors = {"model.embed_tokens.weight": embed}
    for layer in range(layers):
        tensors |= _layer(draw, config, layer, widths[layer])
    tensors["model.norm.weight"] = draw.norm(hidden)
    tensors["lm_head.weight"] = lm_head

    if "num_nextn_predict_layers" in config:
        for layer in range(layers, layers + mtp):
            prefix = f"model.layers.{layer}"
            # The draft sees the next token's embedding first of all.
            eh_proj = 0.3 * draw.linear(hidden, 2 * hidden)
            eh_proj[:, :hidden] += torch.eye(hidden)
            tensors |= _layer(draw, config, layer, widths[layer])
            tensors |= {
                f"{prefix}.embed_tokens.weight": embed,
                f"{prefix}.enorm.weight": draw.norm(hidden),
                f"{prefix}.hnorm.weight": draw.norm(hidden),
                f"{prefix}.eh_proj.weight": eh_proj,
                f"{prefix}.shared_head.norm.weight": draw.norm(hidden),
                f"{prefix}.shared_head.head.weight": lm_head,
            }
    return {
        # A copy for each name: safetensors refuses tensors that share memory.
        name: tensor.to(
            torch.float32
            if name.endswith("e_score_correction_bias")
            else getattr(torch, dtype),
            copy=True,
        ).contiguous()
        for name, tensor in tensors.items()
    }


def save_checkpoint(
    path: str | Path, config: dict[str, Any], tensors: Tensors, *, shards: int = 1
) -> Path:
    """Writes the config, the tensors with their index, and a tokenizer."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: t for name, t in tensors.items() if weight_map[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    _write_tokenizer(path)
    return path


class _Draw:
    """Random weights from one seed, scaled by their shape."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def linear(self, out_features: int, in_features: int) -> torch.Tensor:
        return self.normal(out_features, in_features) / math.sqrt(in_features)

    def norm(self, features: int) -> torch.Tensor:
        return 1 + 0.1 * self.normal(features)


def _layer(draw: _Draw, config: dict[str, Any], layer: int, width: int) -> Tensors:
    """One decoder layer, with `width` routed experts if it is an MoE layer."""
    hidden = config["hidden_size"]
    prefix = f"model.layers.{layer}"
    tensors = {
        f"{prefix}.input_layernorm.weight": draw.norm(hidden),
        f"{prefix}.post_attention_layernorm.weight": draw.norm(hidden),
    }
    attention = _mla if "kv_lora_rank" in config else _gqa
    tensors |= {f"{prefix}.self_attn.{name}": t for name, t in attention(draw, config)}
    tensors |= {
        f"{prefix}.mlp.{name}": t for name, t in _mlp(draw, config, layer, width)
    }
    return tensors


def _mla(draw: _Draw, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    kv_rank, v_dim = config["kv_lora_rank"], config["v_head_dim"]
    q_rank = config.get("q_lora_rank")
    if q_rank is None:
        yield "q_proj.weight", draw.linear(heads * (nope + rope), hidden)
    else:
        yield "q_a_proj.weight", draw.linear(q_rank, hidden)
        yield "q_a_layernorm.weight", draw.norm(q_rank)
        yield "q_b_proj.weight", draw.linear(heads * (nope + rope), q_rank)
    yield "kv_a_proj_with_mqa.weight", draw.linear(kv_rank + rope, hidden)
    yield "kv_a_layernorm.weight", draw.norm(kv_rank)
    yield "kv_b_proj.weight", draw.linear(heads * (nope + v_dim), kv_rank)
    yield "o_proj.weight", 0.5 * draw.linear(hidden, heads * v_dim)
    if "index_topk" in config:
        index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        yield "indexer.wq_b.weight", draw.linear(index_heads * index_dim, q_rank)
        yield "indexer.wk.weight", draw.linear(index_dim, hidden)
        yield "indexer.k_norm.weight", draw.norm(index_dim)
        yield "indexer.k_norm.bias", 0.1 * draw.normal(index_dim)
        yield "indexer.weights_proj.weight", draw.linear(index_heads, hidden)


def _gqa(draw: _Draw, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, count in ("q", heads), ("k", kv_heads), ("v", kv_heads):
        yield f"{name}_proj.weight", draw.linear(count * head_dim, hidden)
        if config["attention_bias"]:
            yield f"{name}_proj.bias", 0.1 * draw.normal(count * head_dim)
    yield "q_norm.weight", draw.norm(head_dim)
    yield "k_norm.weight", draw.norm(head_dim)
    yield "o_proj.weight", 0.5 * draw.linear(hidden, heads * head_dim)


def _mlp(
    draw: _Draw, config: dict[str, Any], layer: int, width: int
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden = config["hidden_size"]

    def projections(name: str, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}gate_proj.weight", draw.linear(size, hidden)
        yield f"{name}up_proj.weight", draw.linear(size, hidden)
        yield f"{name}down_proj.weight", draw.linear(hidden, size)

    dense = (
        layer in config["mlp_only_layers"]
        if "mlp_only_layers" in config
        else layer < config["first_k_dense_replace"]
    )
    if dense:
        yield from projections("", config["intermediate_size"])
        return
    # Twice the usual spread, so that the chosen experts have a clear margin.
    yield "gate.weight", 2 * draw.linear(width, hidden)
    if config.get("topk_method") == "noaux_tc":
        yield "gate.e_score_correction_bias", 0.1 * draw.normal(width)
    size = config["moe_intermediate_size"]
    for expert in range(width):
        yield from projections(f"experts.{expert}.", size)
    if shared := config.get("n_shared_experts"):
        yield from projections("shared_experts.", shared * size)


def _write_tokenizer(path: Path) -> None:
    """A word for each token id from 3 on: "w5 w17" is [5, 17]."""
    specials = ["<s>", "</s>", "<unk>"]
    words = specials + [f"w{i}" for i in range(len(specials), VOCAB_SIZE)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
