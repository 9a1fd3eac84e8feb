# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Checkpoints that the engines serve, and their references in transformers."""

import json

import pytest

from tests.checkpoints import write_checkpoint
from tests.packs import KINDS, LINEARS, Format, write_pack
from tests.reference_codec import CODEBOOKS
from tests.serving.oracle import load_reference, widen

#: A dense layer, two decoder layers of unequal width, and a draft wider than both.
#: No two ranks can share 7 or 5 experts evenly.
WIDTHS = [0, 7, 5, 8]

#: Every legal pair of bits and codebook, in an order that gives all three projections
#: of an expert every pair sooner or later: 28 is no multiple of 3.
FORMATS = [
    *(Format(bits, codebook) for bits in range(1, 9) for codebook in CODEBOOKS),
    *(Format(bits, "mul1") for bits in (1.5, 2.5, 3.5)),
    Format(4, "mcg"),
]
#: What four ranks can cut at multiples of 128, together with slices of 128.
_FOUR_RANKS = {
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "*self_attn*"],
}

#: Packs by name, as arguments of `write_pack`. With these seeds the best token leads
#: the second by 0.05 or more in every greedy step, so that a difference within the
#: tests' tolerance changes no token.
PACKS = {
    # One of everything: linears, head, MLA, experts, draft.
    "every format": {
        "trunk": {*LINEARS, "head"},
        "formats": FORMATS,
        "widths": WIDTHS,
        "shards": 3,
    },
    # Two slices an expert, under the stamp of another method, next to plain linears.
    "two ranks": {
        "seed": 3,
        "model_type": "glm_moe_dsa",
        "trunk": {*LINEARS, "head"},
        "formats": [Format(3), Format(4)],
        "ranks": 2,
        "widths": WIDTHS,
        "shards": 3,
        "stamp": _MODELOPT,
        **_FOUR_RANKS,
    },
    "four ranks": {
        "seed": 7,
        "trunk": {*LINEARS, "head"},
        "formats": [Format(4), Format(3), Format(6)],
        "ranks": 4,
        "widths": WIDTHS,
        **_FOUR_RANKS,
    },
    # Experts alone, with no other sign of EXL3 than the tail, and a dense draft.
    "shared vectors": {
        "seed": 8,
        "trunk": {"experts"},
        "draft": (),
        "formats": [Format(3)],
        "ranks": 2,
        "shared_h": True,
        "tensor_storage": False,
        "stamp": {},
    },
    "draft alone": {
        "seed": 2,
        "trunk": (),
        "draft": {"experts"},
        "formats": [Format(3)],
        "ranks": 2,
        "widths": WIDTHS,
    },
    # Modules that upstream builds without a quantization config are EXL3 too.
    "every kind": {
        "seed": 10,
        "model_type": "deepseek_v32",
        "trunk": set(KINDS),
        "formats": [Format(5, "3inst"), Format(6, "mul1"), Format(5, "mcg")],
        "legacy_signs": True,
    },
    "other names": {
        "model_type": "qwen3_moe",
        "trunk": {"experts"},
        "formats": [Format(4), Format(3)],
        "ranks": 2,
    },
    # No size is a multiple of 128, except those that the attention kernel fixes.
    "padded": {
        "seed": 2,
        "trunk": {*LINEARS, "head"},
        "hidden": 192,
        "moe_intermediate_size": 160,
        "intermediate_size": 320,
    },
}


class Checkpoints:
    """Tiny float32 checkpoints by name, each written when it is first asked for."""

    def __init__(self, folder):
        self.folder = folder
        self._references = {}

    def path(self, model_type, *, unequal):
        """A checkpoint's folder. Its tensors lie in three files."""
        path = self.folder / f"{model_type}-{'unequal' if unequal else 'equal'}"
        if not path.exists():
            widths = WIDTHS if unequal else None
            if unequal and model_type == "qwen3_moe":
                widths = WIDTHS[:-1]  # it has no draft
            write_checkpoint(
                path, model_type=model_type, widths=widths, dtype="float32", shards=3
            )
        return path

    def reference(self, model_type, *, unequal):
        """The same model in transformers, in float32."""
        path = self.path(model_type, unequal=unequal)
        if path not in self._references:
            same = path
            if unequal:
                same = widen(path, path.with_name(f"{path.name}-widened"))
            self._references[path] = load_reference(same)
        return self._references[path]


class Packs:
    """EXL3 checkpoints by name, each written when it is first asked for."""

    def __init__(self, folder):
        self.folder = folder
        self._packs = {}
        self._references = {}

    def __getitem__(self, name):
        """The pack and its twin."""
        if name not in self._packs:
            path = self.folder / name.replace(" ", "-")
            self._packs[name] = write_pack(path, **PACKS[name])
        return self._packs[name]

    def reference(self, name):
        """The pack's twin in transformers, in float32."""
        if name not in self._references:
            twin = self[name].twin
            config = json.loads((twin / "config.json").read_text())
            if "n_routed_experts_per_layer" in config:
                twin = widen(twin, twin.with_name(f"{twin.name}-widened"))
            self._references[name] = load_reference(twin)
        return self._references[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def packs(tmp_path_factory):
    return Packs(tmp_path_factory.mktemp("packs"))
