# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Whatever a checkpoint's files hold, there is a plan or one line that refuses it.

Valid small checkpoints are damaged: their JSON by replaced, lost and swapped values,
their tensors by other names, types and shapes under headers that are right again, and
their files by wrong bytes.
"""

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.plan import (
    read_config,
    read_with_modules,
    survey,
    text_config,
)
from exl3.checkpoint.problems import Problems
from exl3.format.errors import CheckpointError
from exl3.tools.inspect.report import Machine, summarize
from exl3.tools.inspect.table import lines as table_lines
from tests.header_files import (
    INDEX_FILE,
    SHARED_H_SCHEMA,
    Tensors,
    dense,
    experts,
    header_of,
    linear,
    tail,
    write_file,
)
from tests.plans import CONFIG, E1, HEAD, L0_NORM, L1, L2, TAIL, without

FILES = ("config.json", "quantization_config.json", "map.json", INDEX_FILE)
SHARDS = ("model-00001.safetensors", "model-00002.safetensors")

MIXED = {
    "bits": "mixed",
    "k_values": [3, 4],
    "bits_per_expert": "map.json:k",
    "moe_layers": [1, 2],
    "experts_per_layer": [0, 4, 3],
}
BLOCK = {
    "quant_method": "exl3",
    "bits": 4,
    "head_bits": 4,
    "codebook": "mcg",
    "tensor_storage": {"lm_head": {"quant_format": "exl3", "bits_per_weight": 4}},
}


def _mixed(expert: int, _: int) -> int:
    return 3 + expert % 2


def _shared() -> Tensors:
    own = without(experts(L1, 4, ranks=2), "_proj.rank0.suh", "_proj.rank1.suh")
    for part, field in (("gate", "suh"), ("up", "suh"), ("down", "svh")):
        for rank in (0, 1):
            shared = f"{E1}.shared_h.{part}_proj.rank{rank}.{field}"
            own[shared] = ("F16", (256,))
            for expert in range(4):
                own.pop(f"{E1}.{expert}.{part}_proj.rank{rank}.{field}", None)
    for expert in range(4):
        for rank in (0, 1):
            own[f"{E1}.{expert}.down_proj.rank{rank}.suh"] = ("F16", (128,))
    return own


_OTHERS = HEAD | dense("model.embed_tokens", 256, 500) | dense("model.norm", 1, 256)
_OTHERS |= L0_NORM
_BIAS = {f"{L1}.mlp.gate.e_score_correction_bias": ("F32", (4,))}
#: Tensors and files of valid checkpoints, in all layouts.
CHECKPOINTS: list[tuple[Tensors, dict[str, Any]]] = [
    (
        _OTHERS
        | experts(L1, 4, ranks=2, bits=_mixed)
        | experts(L2, 3, ranks=2, bits=_mixed),
        {
            "config.json": CONFIG | {"hybrid_tr3_tail": TAIL | MIXED},
            "map.json": {"1": {"k": [3, 4, 3, 4]}, "2": {"k": [3, 4, 3]}},
        },
    ),
    (
        _OTHERS | _shared() | _BIAS,
        {
            "config.json": {
                "text_config": CONFIG | {"n_group": 2, "topk_group": 1},
                "hybrid_tr3_tail": TAIL
                | {
                    "rotation_layout": "shared_h_v1",
                    "shared_h_tensor_schema": SHARED_H_SCHEMA,
                },
            }
        },
    ),
    (
        _OTHERS
        | experts(L1, 4, bits=lambda expert, at: 3 + (expert + at) % 4)
        | dense("model.layers.2.mlp.experts.0.up_proj", 256, 256)
        | linear("model.layers.0.mlp.down_proj", 256, 256, 2.5, "mul1"),
        {
            "config.json": CONFIG
            | {
                "quantization_config": BLOCK,
                "n_routed_experts_per_layer": [0, 4],
                "reap_pruning": {"n_routed_experts_per_layer": [4]},
            },
            "quantization_config.json": BLOCK,
        },
    ),
    (
        _OTHERS | experts(L1, 4, ranks=2, bits=3),
        {
            "config.json": CONFIG
            | {
                "hybrid_tr3_tail": tail(
                    2, (1, 1), 4, trellis_bits_by_layer={"1": 3}, bits=None
                ),
                "num_key_value_heads": 2,
                "mlp_layer_types": ["dense", "sparse"],
            }
        },
    ),
]

#: What nobody expects, and what somebody expects elsewhere.
VALUES = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, 1, -1, 2, 3, 4, 16, 128, 2**31, 2**63, 10**40),
            *(1.5, 3.0, float("nan"), float("inf"), -0.0),
            *(
                "",
                "x",
                "a\nb",
                "\ud800",
                "3",
                "4",
                "-1",
                "mixed",
                "exl3",
                "mcg",
                "mul1",
            ),
            *("../x", "map.json:k", "config.json", "dense", SHARDS[0], "y" * 5000),
            *([], {}, [[]], [0], [1, 2], {"1": 4}, {"x": 1}, [None] * 40),
        ]
    ),
    st.integers(-10, 10_000),
    st.text(max_size=8),
    st.lists(st.integers(0, 8), max_size=5),
    st.dictionaries(
        st.sampled_from(["0", "1", "2", "k", "9" * 7]), st.integers(), max_size=3
    ),
).map(copy.deepcopy)  # they are damaged in turn
FIELDS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias", "weight", "scale")
PARTS = (
    *(
        "lm_head",
        "model",
        "layers",
        "mtp",
        "mlp",
        "experts",
        "shared_h",
        "gate",
        "gate_proj",
    ),
    *(
        "w1",
        "rank0",
        "rank1",
        "rank7",
        "0",
        "1",
        "2",
        "3",
        "03",
        "999999",
        "gate_up_proj",
    ),
    *("e_score_correction_bias", "r7_shared", "\n", "é", *FIELDS),
)
DTYPES = ("I16", "F16", "BF16", "I32", "F32", "U8", "F8_E4M3")
SIZES = st.sampled_from([0, 1, 3, 4, 8, 16, 24, 40, 48, 64, 100, 128, 144, 256, 2**20])


def _places(value: Any, at: tuple = ()) -> list[tuple]:
    """The way to every value within a JSON value."""
    found = [at] if at else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += _places(inner, (*at, index))
    return found


def _damage_json(draw: Callable, value: Any) -> Any:
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(value)
        if not places:
            return draw(VALUES)
        *way, last = draw(st.sampled_from(places))
        holder = value
        for key in way:
            holder = holder[key]
        what = draw(st.sampled_from(["replace", "replace", "lose", "move"]))
        if what == "replace":
            holder[last] = draw(VALUES)
        elif what == "lose":
            del holder[last]
        elif isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = holder.pop(last)
        else:
            holder.append(holder[last])
    return value


def _damage_tensors(draw: Callable, tensors: Tensors) -> Tensors:
    tensors = dict(tensors)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(tensors)))
        dtype, shape = tensors[name]
        what = draw(st.sampled_from(["lose", "rename", "add", "dtype", "shape"]))
        if what == "lose":
            del tensors[name]
        elif what in ("rename", "add"):
            parts = name.split(".")
            at = draw(st.integers(0, len(parts) - 1))
            parts[at] = draw(st.sampled_from(PARTS))
            if what == "rename":
                del tensors[name]
            tensors[".".join(parts)] = (dtype, shape)
        elif what == "dtype":
            tensors[name] = (draw(st.sampled_from(DTYPES)), shape)
        else:
            tensors[name] = (dtype, tuple(draw(st.lists(SIZES, max_size=4))))
        if not tensors:
            break
    return tensors


class Files(dict[str, Any]):
    """The files of a checkpoint: bytes, or a header and the size of a body."""

    def __repr__(self) -> str:
        return f"Files of {sorted(self)}"  # hypothesis prints how to draw them again


@st.composite
def checkpoints(draw: Callable) -> Files:
    """A damaged checkpoint."""
    tensors, content = draw(st.sampled_from(CHECKPOINTS))
    kind = draw(st.sampled_from(["json", "tensors", "tensors", "header", "bytes"]))
    if kind == "tensors":
        tensors = _damage_tensors(draw, tensors)
    names = list(tensors)
    shards = [{name: tensors[name] for name in names[at::2]} for at in (0, 1)]
    index = dict(zip(names, SHARDS * len(names), strict=False))
    content = content | {INDEX_FILE: {"weight_map": index}}
    if draw(st.booleans()):
        del content[INDEX_FILE]
    damaged = draw(st.sampled_from(sorted(content)))
    if kind == "json" or (kind == "tensors" and draw(st.booleans())):
        content = content | {damaged: _damage_json(draw, content[damaged])}
    files = Files((name, json.dumps(value).encode()) for name, value in content.items())
    for file, shard in zip(SHARDS, shards, strict=True):
        header, body = header_of(shard)
        files[file] = (header, min(body, 2**40))  # what a file system can hold
    if kind == "header":
        header, body = files[SHARDS[0]]
        files[SHARDS[0]] = (_damage_json(draw, header), body)
    if kind == "bytes":
        name = draw(st.sampled_from(sorted(files)))
        whole = files[name] if isinstance(files[name], bytes) else b""
        at = draw(st.integers(0, len(whole)))
        files[name] = whole[:at] + draw(st.binary(max_size=12)) + whole[at + 3 :]
    return files


def all_problems(folder: Path) -> list[str]:
    """What a tool tells of a checkpoint that the server's reader refuses at once."""
    problems = Problems(collect=True)
    try:
        survey(folder, read_config(folder), problems)
    except CheckpointError as error:
        if error not in problems.found:
            problems.found.append(error)
    return [str(problem) for problem in problems.found]


def check(files: Files) -> None:
    """Reads a checkpoint as the server and `exl3 inspect` do."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in files.items():
            if isinstance(content, bytes):
                (folder / file).write_bytes(content)
            else:
                write_file(folder / file, *content)
        try:
            config = read_config(folder)
            found = survey(folder, config, Problems())
            widths = resolve_widths(text_config(config), found.checkpoint.widths)
            machine = Machine(gpu_bytes=2**34, max_model_len=4096)
            report = summarize(found, config, widths, machine)
            json.dumps(report)
            assert list(table_lines(report))
            lines = (*found.checkpoint.plan.warnings, *report["problems"])
        except CheckpointError as error:
            lines = (str(error),)
            told = all_problems(folder)
            # None beside what is told of widths, which are looked at last.
            assert not told or told[0] == lines[0], (told[0], lines[0])
            lines = (*lines, *told)
        for line in lines:
            assert "\n" not in line, line
            assert 20 < len(line) < 2500, line
            line.encode()  # to be printed


def test_the_checkpoints_are_valid_before_they_are_damaged():
    for tensors, content in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_file(folder / SHARDS[0], *header_of(tensors))
            for file, value in content.items():
                (folder / file).write_text(json.dumps(value))
            config = read_config(folder)
            checkpoint, _ = read_with_modules(folder, config)
            resolve_widths(text_config(config), checkpoint.widths)
            assert checkpoint.plan.is_exl3
            assert not [w for w in checkpoint.plan.warnings if "codebook" not in w]


_ALL = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=500, derandomize=True, **_ALL)
@given(checkpoints())
def test_damaged_checkpoints_are_planned_or_refused(files):
    check(files)


@pytest.mark.slow
@settings(max_examples=12_000, print_blob=True, **_ALL)
@given(checkpoints())
def test_many_damaged_checkpoints_are_planned_or_refused(files):
    check(files)
