# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Names of fields and literal values of the metadata in `config.json`."""

#: The key of a rank-sliced checkpoint's metadata.
TAIL = "hybrid_tr3_tail"
TAIL_FORMAT = "exl3-trellis"
#: Format tags, compared literally: real names may have another prefix.
TENSOR_SCHEMA = "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}"
SHARED_H_SCHEMA = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"
PER_EXPERT_LAYOUT = "per_expert_v1"
SHARED_H_LAYOUT = "shared_h_v1"
