# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Writes a trained state as a Hugging Face checkpoint.

    python -m tools.demo_model.export pretrain OUT --work-dir build/demo_model

All weights are stored in bfloat16, but for the routers' selection bias.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.config import ModelConfig
from tools.demo_model.files import TOKENIZER_FILE, made
from tools.demo_model.model import DemoModel
from tools.demo_model.tokenizer import EOS_ID, EOS_TOKEN, PAD_ID, PAD_TOKEN

WEIGHTS_FILE = "model.safetensors"
WIDTHS_FIELD = "n_routed_experts_per_layer"
INDEX_HEADS = 1
INDEX_HEAD_DIM = 128
INDEXER_SEED = 1613
# What a request that names no temperature gets: small models loop when greedy.
TEMPERATURE = 0.7

# A base model continues text, so a conversation is its messages in a row.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first %} {% endif -%}"
    "{{- message['content'] | trim -}}"
    "{%- endfor -%}"
)


def hf_config(config: ModelConfig) -> dict:
    """`config.json` of the model; widths are written only where they differ."""
    moe_widths = [width for width in config.widths if width]
    fields = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "first_k_dense_replace": config.widths.index(moe_widths[0]),
        "n_routed_experts": max(moe_widths),
        "n_shared_experts": 1,
        "num_experts_per_tok": config.num_experts_per_tok,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_interleave": True,
        "max_position_embeddings": config.max_position_embeddings,
        "index_topk": config.max_position_embeddings,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_HEAD_DIM,
        "indexer_rope_interleave": True,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if len(set(moe_widths)) > 1:
        fields[WIDTHS_FIELD] = list(config.widths)
    return fields


def hf_name(config: ModelConfig, name: str) -> str:
    """The checkpoint's name of one of the model's modules or tensors."""
    if name.split(".")[0] == "mtp":
        return name.replace("mtp", f"model.layers.{config.num_hidden_layers}", 1)
    return name if name.startswith("lm_head") else f"model.{name}"


def hf_tensors(model: DemoModel) -> dict[str, Tensor]:
    """The checkpoint's tensors by name, in the module's dtype (float32).

    The MTP layer is the layer after the trunk's. It stores neither embedding nor
    head: the trunk's serve it.
    """
    tensors = {}
    for name, value in model.state_dict().items():
        name = hf_name(model.config, name)
        if name.endswith(".mlp.gate_up"):
            prefix = name.removesuffix("gate_up") + "experts"
            for expert, (gate, up) in enumerate(v.chunk(2) for v in value):
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}.{expert}.up_proj.weight"] = up
        elif name.endswith(".mlp.down"):
            prefix = name.removesuffix("down") + "experts"
            for expert, down in enumerate(value):
                tensors[f"{prefix}.{expert}.down_proj.weight"] = down
        else:
            tensors[name] = value
    return tensors | indexer_tensors(model.config)


def indexer_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Random weights for the sparse-attention indexers of all layers.

    They choose nothing: up to `index_topk` tokens the indexer takes all of them,
    and the model's positions end there.
    """
    generator = torch.Generator().manual_seed(INDEXER_SEED)
    shapes = {
        "wq_b.weight": (INDEX_HEADS * INDEX_HEAD_DIM, config.q_lora_rank),
        "wk.weight": (INDEX_HEAD_DIM, config.hidden_size),
        "weights_proj.weight": (INDEX_HEADS, config.hidden_size),
    }
    tensors = {}
    for layer in range(len(config.widths)):
        prefix = f"model.layers.{layer}.self_attn.indexer"
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator)
            tensors[f"{prefix}.{name}"] = weight * config.initializer_range
        tensors[f"{prefix}.k_norm.weight"] = torch.ones(INDEX_HEAD_DIM)
        tensors[f"{prefix}.k_norm.bias"] = torch.zeros(INDEX_HEAD_DIM)
    return tensors


def stored(name: str, tensor: Tensor) -> Tensor:
    """The tensor as stored: bfloat16, but for the selection bias (float32)."""
    keep = name.endswith("e_score_correction_bias")
    return tensor.to(torch.float32 if keep else torch.bfloat16).contiguous()


def write(model: DemoModel, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the checkpoint's files to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: stored(name, tensor) for name, tensor in hf_tensors(model).items()}
    save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    tokenizer.save(str(out / TOKENIZER_FILE))
    files = {
        "config.json": hf_config(model.config),
        "generation_config.json": {
            "do_sample": True,
            "temperature": TEMPERATURE,
            "top_p": 0.9,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "pad_token": PAD_TOKEN,
            "model_max_length": model.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def load_state(work_dir: Path, name: str) -> DemoModel:
    """The model of a state that `train` or `prune` wrote, in float32."""
    state = torch.load(made(work_dir, f"{name}.pt"))
    model = DemoModel(ModelConfig().with_widths(state["widths"]))
    model.load_state_dict(state["model"])
    return model.eval()


def main() -> None:
    """Exports one state."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", help="name of the run: pretrain or finetune")
    parser.add_argument("out", type=Path)
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(made(args.work_dir, TOKENIZER_FILE)))
    write(load_state(args.work_dir, args.state), tokenizer, args.out)


if __name__ == "__main__":
    main()
