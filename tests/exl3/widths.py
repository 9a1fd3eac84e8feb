# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A config of few layers, the tensors that say its widths, and what is made of both."""

from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.stored_widths import read_stored

# Five layers, the first dense, and one draft layer. A list by global index, a list
# with the draft, one of the MoE layers only, and that with the draft have the
# lengths 5, 6, 4 and 5: the first and the last can only be told apart by content.
BASE = {
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


def gates(widths, *, file="model.safetensors", hidden=16):
    return [
        TensorHeader(f"model.layers.{layer}.mlp.gate.weight", "F32", (w, hidden), file)
        for layer, w in enumerate(widths)
        if w
    ]


def resolve(config, headers=()):
    return resolve_widths(config, read_stored(headers, config["num_hidden_layers"]))
