# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 prune` and `exl3 quantize` hold one layer in memory, however many there are."""

import ctypes
import random
import sys
from pathlib import Path

import pytest

from exl3 import cli
from exl3.codec import scale
from exl3.tools.prune import write
from tests.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.exl3.interruptions import Run

#: Layers of a small model and of a large one. The first layer is dense.
FEW, MANY = 2, 6
HIDDEN = 128
#: Intermediate features of a layer, in one matrix or in several.
WIDE = 32768
#: Of the wide matrices in BF16. To be run they are float32, twice as much.
LAYER_BYTES = 2 * 3 * WIDE * HIDDEN
TOKENS = 64

_M_MMAP_THRESHOLD = -3  # malloc.h


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words = (f"w{draw.randrange(3, VOCAB_SIZE)}" for _ in range(TOKENS))
    file.write_text(" ".join(words))
    return file


def measured(arguments):
    """Runs a command in a process of its own, and says what memory it took at most."""
    # glibc keeps freed blocks of less than 32 MB, wherever something lies between them.
    # Real matrices are larger; these are not, so that they take no time.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    write._LEAST_SHARD = 0  # so that a shard is a layer
    scale._SAMPLE = 8  # a rough search, which is quick
    code = cli.main(arguments)
    # The `ru_maxrss` of a process that was forked begins with its parent's.
    rows = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (row.split()[1] for row in rows if row.startswith("VmHWM:"))
    print(1024 * int(peak), file=sys.stderr)
    return code


def peak_bytes(folder, command, options, layers, **sizes):
    """The most memory that a command takes on a model of so many layers."""
    source = write_checkpoint(
        folder / f"source-{layers}",
        hidden=HIDDEN,
        layers=layers,
        intermediate_size=WIDE,
        mtp=0,
        num_nextn_predict_layers=0,
        **sizes,
    )
    out = folder / f"out-{layers}"
    ended = Run(measured, [command, str(source), str(out), *map(str, options)]).end()
    assert ended.code == 0, ended.error
    assert out.is_dir()
    return int(ended.error)


def check(folder, command, options, **sizes):
    few, many = (
        peak_bytes(folder, command, options, layers, **sizes) for layers in (FEW, MANY)
    )
    print(f"{few / 1e6:.1f} MB, {many / 1e6:.1f} MB")
    # Differences seen are a third of a layer. What is kept of each is four of them.
    assert many - few < LAYER_BYTES


def test_prune(text, tmp_path):
    """Large experts, of which half are removed."""
    options = ["--keep-ratio", "0.5", "--text", text, "--tokens", TOKENS]
    check(tmp_path, "prune", options, experts=8, moe_intermediate_size=WIDE // 8)


def test_quantize(text, tmp_path):
    """Small experts, which are encoded, beside large weights, which stay dense."""
    bits = ["--bits", "3", "--attn-bits", "16", "--head-bits", "16"]
    options = [*bits, "--text", text, "--tokens", TOKENS]
    sizes = {"experts": 2, "n_shared_experts": WIDE // 128}
    check(tmp_path, "quantize", options, moe_intermediate_size=128, **sizes)
