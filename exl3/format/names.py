# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Names of tensors, for plain and for rank-sliced checkpoints.

- `model.layers.3.self_attn.q_proj.trellis`
- `model.layers.3.mlp.experts.7.gate_proj.trellis`
- `model.layers.3.mlp.experts.7.gate_proj.rank0.trellis`
- `model.layers.3.mlp.experts.shared_h.gate_proj.rank0.suh`
"""

import re

#: Tensors that only an EXL3 module has, besides `trellis` itself.
EXL3_FIELDS = frozenset({"suh", "svh", "su", "sv", "mcg", "mul1"})
#: What stands in place of an expert's index in vectors that all experts share.
SHARED_H = "shared_h"
#: The three matrices of an expert, and the spellings of each.
PROJECTIONS = ("gate", "up", "down")
PROJECTION_OF = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}

#: All experts of a layer in one tensor, as some dense checkpoints have them.
STACKS = ("gate_up_proj", "down_proj")

#: The one expression for tensor names. `module` is what the tensor belongs to, without
#: a rank; `experts` and `expert` are set for a routed expert's projection. Indices
#: have few digits, since a name may be hostile.
TENSOR_NAME = re.compile(
    r"(?P<module>(?P<experts>.+\.experts)\.(?P<expert>[0-9]{1,6}|shared_h)"
    r"\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)|.+?)"
    r"(?:\.rank(?P<rank>[0-9]{1,4}))?\.(?P<field>[^.]+)"
)


def parse_name(name: str) -> re.Match[str] | None:
    """Splits a tensor's name; None if it has no dot and so belongs to no module."""
    return TENSOR_NAME.fullmatch(name)


#: What a draft has from its target, whether or not it is stored with it.
SHARED_WITH_TARGET = ("embed_tokens", "shared_head.head")
#: Stands for a number of decoder layers that no config states; larger than any index.
UNKNOWN_LAYERS = 10**6


def layer_of(module: str, num_layers: int) -> int | None:
    """The global index of the layer that a module belongs to, or None.

    Args:
        module: The module's name.
        num_layers: Decoder layers, which a draft's `mtp.layers.0` comes after.
    """
    match = _LAYER.search(module)
    if match is None:
        return None
    return int(match["layer"]) + (num_layers if match["mtp"] else 0)


_LAYER = re.compile(r"(?:^|\.)(?P<mtp>mtp\.)?layers\.(?P<layer>[0-9]{1,6})(?:\.|$)")
