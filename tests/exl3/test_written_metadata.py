# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What is written beside a pack's tensors is what the reader takes."""

import json

from exl3.checkpoint.file_header import TensorHeader
from exl3.format.constants import Codebook
from exl3.format.metadata import QuantizationConfig
from exl3.format.tail import Tail
from exl3.tools.quantize import metadata

BITS = {1: [3, 4, 3], 2: [4, 4], 3: [3, 3, 3]}


def test_tail_is_what_the_reader_expects():
    tail = Tail.parse(metadata.rank_sliced_tail(BITS, 2), "tail")
    assert (tail.ranks, tail.layers) == (2, range(1, 4))
    assert [tail.width(layer) for layer in range(4)] == [0, 3, 2, 3]
    assert tail.k_values == {3, 4}
    assert (tail.bits, tail.shared_h) == (None, False)
    assert (tail.bits_file, tail.bits_field) == ("bits_map.json", "k")
    written = json.loads(json.dumps(metadata.bits_map(BITS)))
    assert written["2"]["k"] == [4, 4]


def test_quantization_config_is_what_the_reader_expects():
    written = metadata.quantization_config("mixed", 6, Codebook.MCG)
    found = QuantizationConfig.parse(written, "config")
    assert found == QuantizationConfig(None, 6, Codebook.MCG)
    written = metadata.quantization_config(4, 6, Codebook.INST3, ignore=["a*"])
    assert written["ignore"] == ["a*"]
    found = QuantizationConfig.parse(written, "config")
    assert found == QuantizationConfig(4, 6, Codebook.INST3)


def test_storage_lists_each_module_and_no_slice():
    tensors = [
        TensorHeader(name, dtype, shape, "model.safetensors")
        for name, dtype, shape in (
            ("model.embed_tokens.weight", "BF16", (4, 8)),
            ("model.layers.0.q_proj.trellis", "I16", (8, 8, 40)),
            ("model.layers.0.q_proj.suh", "F16", (128,)),
            ("model.layers.0.q_proj.svh", "F16", (128,)),
            ("model.layers.0.q_proj.mul1", "I32", ()),
            ("model.layers.1.mlp.experts.0.up_proj.rank0.suh", "F16", (128,)),
        )
    ]
    storage = metadata.tensor_storage(tensors)
    assert storage.keys() == {"model.embed_tokens", "model.layers.0.q_proj"}
    assert storage["model.embed_tokens"] == {
        "stored_tensors": {
            "model.embed_tokens.weight": {
                "shape": [4, 8],
                "n_bytes": 64,
                "dtype": "torch.bfloat16",
            }
        }
    }
    module = storage["model.layers.0.q_proj"]
    stored = module.pop("stored_tensors")
    assert module == {
        "quant_format": "exl3",
        "bits_per_weight": 2.5,
        "mul1_multiplier": 0x83DCD12D,
    }
    assert stored.keys() == {at.name for at in tensors if ".q_proj." in at.name}
    assert stored["model.layers.0.q_proj.mul1"]["shape"] == []
