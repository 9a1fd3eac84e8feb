# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""An EXL3 checkpoint that cannot be served is refused in one line with the cause.

What the headers show is refused before a weight is read, and what only the weights
show when they arrive.
"""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.damage import with_json, with_tensors
from tests.packs import Format, write_pack
from tests.serving.generate import Case, free_port, run

DOWN = "model.layers.2.mlp.experts.3.down_proj"
SLICE = f"{DOWN}.rank1"
O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("refused")


@pytest.fixture(scope="module")
def path(folder):
    """A sound pack, of which the others are copies with one thing wrong."""
    formats = [Format(3), Format(4)]
    pack = write_pack(folder / "sound", formats=formats, ranks=2, shards=2)
    return pack.path


def missing(tensors):
    del tensors[f"{SLICE}.svh"]


def misshaped(tensors):
    tensors[f"{O_PROJ}.suh"] = tensors[f"{O_PROJ}.suh"][:128].clone()


def no_legal_rate(tensors):
    trellis = tensors[f"{O_PROJ}.trellis"]
    tensors[f"{O_PROJ}.trellis"] = trellis[:, :, :40].contiguous()


def not_a_number(tensors):
    tensors[f"{SLICE}.suh"][5] = torch.nan


def infinite(tensors):
    tensors[f"{O_PROJ}.svh"][5] = torch.inf


def another_multiplier(tensors):
    tensors[f"{O_PROJ}.mcg"] += 2


def twice(path, out):
    """One tensor in both shards, of which the index knows one."""
    with_tensors(path, out, lambda tensors: None)
    for shard in sorted(out.glob("*.safetensors")):
        tensors = load_file(shard)
        tensors[f"{O_PROJ}.svh"] = torch.ones(256, dtype=torch.float16)
        save_file(tensors, shard)
    return out


def without_shard(path, out):
    with_json(path, out, lambda config: None)
    (out / "model-00002-of-00002.safetensors").unlink()
    return out


def without_schema(config):
    config["hybrid_tr3_tail"]["rotation_layout"] = "shared_h_v1"


def other_bits(config):
    config["hybrid_tr3_tail"] |= {"bits": 3}


def other_ranks(config):
    config["hybrid_tr3_tail"]["tp"] = 4


#: A copy with something wrong, and what the refusal names.
TENSORS = {
    missing: [SLICE, "neither svh nor sv"],
    misshaped: [f"{O_PROJ}.suh", "[128]", "[256]"],
    no_legal_rate: [f"{O_PROJ}.trellis", "40 words"],
    not_a_number: [f"{SLICE}.suh", "NaN"],
    infinite: [f"{O_PROJ}.svh", "infinity"],
    another_multiplier: [f"{O_PROJ}.mcg", "3417055213"],
}
CONFIGS = {
    without_schema: ["hybrid_tr3_tail", "shared_h_tensor_schema"],
    other_bits: ["hybrid_tr3_tail", "3", "4"],
    other_ranks: ["hybrid_tr3_tail", "tp", "4", "2"],
}
FOLDERS = {
    twice: [f"{O_PROJ}.svh", "does not place there"],
    without_shard: ["model-00002-of-00002.safetensors", "missing"],
}
#: Options that a sound pack cannot be served with.
OPTIONS = {
    "four ranks": (
        {"tensor_parallel_size": 4},
        ["model.layers.1.mlp.experts", "2 slices of 128", "4 ranks", "[1, 2]"],
    ),
    "another method": ({"quantization": "fp8"}, ["exl3", "fp8"]),
}
REFUSED = {
    **{change.__name__: says for change, says in TENSORS.items()},
    **{change.__name__: says for change, says in CONFIGS.items()},
    **{make.__name__: says for make, says in FOLDERS.items()},
    **{name: says for name, (_, says) in OPTIONS.items()},
}


@pytest.fixture(scope="module")
def copies(path, folder):
    """The copies, by what is wrong with them."""
    made = {}
    for change in TENSORS:
        made[change.__name__] = with_tensors(path, folder / change.__name__, change)
    for change in CONFIGS:
        made[change.__name__] = with_json(path, folder / change.__name__, change)
    for make in FOLDERS:
        made[make.__name__] = make(path, folder / make.__name__)
    return made


@pytest.fixture(scope="module")
def errors(path, copies):
    cases = {name: Case(str(copy)) for name, copy in copies.items()}
    for name, (options, _) in OPTIONS.items():
        cases[name] = Case(str(path), options)
    results = run(*cases.values())
    return {name: result.error for name, result in zip(cases, results, strict=True)}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(errors, name):
    error = errors[name]
    assert error is not None
    lines = [
        line
        for line in error.splitlines()
        if all(part in line for part in REFUSED[name])
    ]
    assert len(lines) == 1, error


@pytest.mark.slow
def test_the_server_names_what_the_weights_show(copies):
    """They are read in another process, whose refusal the server passes on."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    server = subprocess.run(
        [*command, "--model", str(copies["not_a_number"]), "--port", str(free_port())],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        check=False,
    )
    last = server.stderr.splitlines()[-1]
    assert last.startswith(f"error: {SLICE}.suh: holds NaN"), last
    assert server.returncode == 1
