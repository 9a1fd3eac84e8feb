# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Every field of the metadata is read, and what is wrong with one is said of it."""

import pytest

from exl3.format.constants import Codebook
from exl3.format.errors import MetadataError, UnsupportedFormatError
from exl3.format.metadata import QuantizationConfig
from exl3.format.tail import Tail
from tests.header_files import SHARED_H_SCHEMA, tail

MIXED = {"bits": "mixed", "k_values": [3, 4], "bits_per_expert": "map.json:k"}
BY_LAYER = {"trellis_bits_by_layer": {"3": 3, "4": 8, "5": 4}}


def parse(**fields):
    return Tail.parse(tail(4, (3, 5), 8, **fields), "config.json: hybrid_tr3_tail")


def test_a_uniform_tail():
    found = parse(bits=3.0, mcg_multiplier=0xCBAC1FED, producer=["anything"])
    assert (found.ranks, found.layers, found.experts) == (4, range(3, 6), 8)
    assert (found.bits, type(found.bits)) == (3, int)
    assert (found.bits_by_layer, found.bits_file, found.shared_h) == (None, None, False)
    assert found.width(3) == 8


def test_a_mixed_tail():
    found = parse(**MIXED | {"bits": "Mixed"})
    assert found.bits is None
    assert (found.bits_file, found.bits_field) == ("map.json", "k")
    assert found.k_values == {3, 4}


@pytest.mark.parametrize("bits", [None, 4.25])
def test_bits_by_layer(bits):
    found = parse(bits=bits, **BY_LAYER)
    assert found.bits_by_layer == {3: 3, 4: 8, 5: 4}
    assert found.bits is None


def test_shared_h():
    found = parse(rotation_layout="shared_h_v1", shared_h_tensor_schema=SHARED_H_SCHEMA)
    assert found.shared_h


@pytest.mark.parametrize(
    "experts", [[0, None, 0, 4, 6, 8], {"3": 4, "4": 6, "5": 8}], ids=["list", "object"]
)
def test_experts_by_layer(experts):
    found = parse(experts_per_layer=experts)
    assert [found.width(layer) for layer in (3, 4, 5, 6)] == [4, 6, 8, None]


REFUSED = {
    "format": ["exl3", 3, None],
    "codebook": ["mul1", "3inst", None],
    "tp": [0, -1, True, 2.0, "2", 10**6, None],
    "moe_layers": [[5, 3], [3], [3, 4, 5], [3, True], [3, 5.0], [-1, 3], "3", None],
    "experts_per_layer": [0, -1, True, 2.5, "8", [4, -1], [4, "x"], {"x": 1}, None],
    "tensor_schema": ["", "model.layers.{L}", 1, None],
    "rotation_layout": ["shared_h_v2", 1, []],
    "bits": [0, 9, 3.5, True, "three", [3], float("nan"), float("inf"), None],
    "mcg_multiplier": [1, 1.5, "x"],
    "tr3_tail_per_layer": [7, "8"],
    "nvfp4_keep_per_layer": [64, "some"],
    "trellis_bits_by_layer": [
        {"3": 3, "4": 4},
        {"3": 3, "4": 4, "5": 4, "6": 4},
        {"3": 3, "4": 4, "5": 9},
        {"3": 3, "4": 4, "5": True},
        {"x": 3},
        [3, 4, 4],
    ],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in REFUSED for value in REFUSED[field]],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises((MetadataError, UnsupportedFormatError)) as error:
        parse(**{field: value})
    line = str(error.value)
    assert field in line
    assert line.startswith("config.json: hybrid_tr3_tail")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k_values", []),
        ("k_values", [3, 9]),
        ("k_values", [3, True]),
        ("k_values", None),
        *[
            ("bits_per_expert", value)
            for value in (
                "map.json",
                "map.json:",
                ":k",
                "../map.json:k",
                "a/map.json:k",
                "a\\map.json:k",
                "..:k",
                ".:k",
                "map\0:k",
                7,
                None,
            )
        ],
    ],
)
def test_a_wrong_field_of_a_mixed_tail_is_named(field, value):
    with pytest.raises(MetadataError, match=field):
        parse(**MIXED | {field: value})


def test_bits_by_layer_and_mixed_bits_exclude_each_other():
    with pytest.raises(MetadataError, match="trellis_bits_by_layer"):
        parse(**BY_LAYER | MIXED)


def test_shared_h_needs_its_schema_and_the_schema_its_layout():
    with pytest.raises(MetadataError, match="has no shared_h_tensor_schema"):
        parse(rotation_layout="shared_h_v1")
    with pytest.raises(MetadataError, match="schema is set, but rotation_layout"):
        parse(shared_h_tensor_schema=SHARED_H_SCHEMA)


def test_a_sibling_of_the_format_is_named():
    with pytest.raises(UnsupportedFormatError, match="exl3-msrt-base/1"):
        parse(runtime_profile="exl3-msrt-base/1", tp=None)


def test_a_tail_is_an_object():
    with pytest.raises(MetadataError, match="expected an object"):
        Tail.parse([1], "config.json: hybrid_tr3_tail")


BLOCK = {
    "quant_method": "exl3",
    "version": "0.0.43",
    "bits": 3.5,
    "head_bits": 6,
    "calibration": {"rows": 250, "cols": 2048},
    "out_scales": "auto",
    "codebook": "mul1",
    "mtp_bits": 16,
    "experimental_options": {"mcg_multiplier": 0xCBAC1FED, "mul1_multiplier": None},
    "original_quantization_config": {"quant_method": "fp8"},
}


def test_a_quantization_config():
    found = QuantizationConfig.parse(BLOCK, "block")
    assert found == QuantizationConfig(3.5, 6, Codebook.MUL1)
    empty = QuantizationConfig.parse({"bits": "mixed"}, "block")
    assert empty == QuantizationConfig(None, None, None)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("bits", "many", "block.bits is 'many'"),
        ("bits", 0, "block.bits is 0"),
        ("head_bits", 17, "block.head_bits is 17"),
        ("mtp_bits", True, "block.mtp_bits is True"),
        ("vision_bits", [], "block.vision_bits is []"),
        ("codebook", "sqg", "block.codebook is 'sqg'"),
        ("codebook", "pair", "block.codebook is 'pair'"),
        ("codebook", 1, "block.codebook is 1"),
        ("experimental_options", 1, "block.experimental_options is 1"),
        ("experimental_options", {"mcg_multiplier": 5}, "block.mcg_multiplier is 5"),
        ("mul1_multiplier", 89226354, "block.mul1_multiplier is 89226354"),
        ("scope", "glm53_routed_experts_only", "glm53_routed_experts_only"),
        ("r7_routed_experts", {"schema": "r7"}, "r7_routed_experts"),
    ],
)
def test_a_wrong_field_of_a_quantization_config_is_named(field, value, says):
    with pytest.raises((MetadataError, UnsupportedFormatError)) as error:
        QuantizationConfig.parse(BLOCK | {field: value}, "block")
    assert says in str(error.value)
