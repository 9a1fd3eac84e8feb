# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What `exl3 inspect` says of the kernels' workspace is what they lay out."""

import ctypes
import re
import subprocess

import pytest

from exl3.tools.inspect import workspace
from tests.kernels.emulated import torch_ops
from tests.kernels.emulated.build import CACHE, CSRC, ROOT

_SOURCE = ROOT / "tests" / "kernels" / "emulated" / "workspace_api.cpp"


@pytest.fixture(scope="module")
def launchers() -> ctypes.CDLL:
    kernels = torch_ops._kernels()
    target = CACHE / f"workspace-{kernels.stem}.so"
    command = ["g++", "-shared", "-std=c++17", "-O2", "-fPIC", "-DEXL3_EMU"]
    command += [f"-I{CSRC}", f"-I{ROOT}", str(_SOURCE), str(kernels)]
    subprocess.run([*command, "-o", str(target)], check=True)
    found = ctypes.CDLL(str(target))
    for name in ("linear_bytes", "moe_bytes"):
        getattr(found, name).restype = ctypes.c_int64
    return found


def test_as_many_rows_run_at_once():
    header = (CSRC / "exl3" / "torch" / "cuda_device.h").read_text()
    found = dict(re.findall(r"constexpr int64_t k(\w+)AtOnce = (\d+);", header))
    assert found == {
        "Rows": str(workspace.ROWS_AT_ONCE),
        "Tokens": str(workspace.TOKENS_AT_ONCE),
    }


@pytest.mark.parametrize("multiprocessors", [20, 108, 188])
@pytest.mark.parametrize(
    ("k", "shards", "columns"),
    [(128, 1, 128), (2048, 2, 640), (6144, 3, 256), (12288, 1, 6144), (512, 1, 151552)],
)
def test_a_linear_op_needs_what_is_said(launchers, k, shards, columns, multiprocessors):
    most = max(
        launchers.linear_bytes(rows, k, shards, columns, multiprocessors)
        for rows in range(1, workspace.ROWS_AT_ONCE + 1)
    )
    said = workspace.linear_bytes(k, shards * columns, shards, multiprocessors)
    assert said == most


@pytest.mark.parametrize("multiprocessors", [20, 108, 188])
@pytest.mark.parametrize(
    ("top_k", "hidden", "intermediate", "experts", "slices"),
    [
        (2, 256, 128, 8, 2),
        (8, 6144, 512, 256, 1),
        (8, 6144, 512, 36, 4),
        (1, 4096, 1408, 1, 1),
        (4, 128, 2048, 60, 1),
    ],
)
def test_routed_experts_need_what_is_said(
    launchers, top_k, hidden, intermediate, experts, slices, multiprocessors
):
    sizes = top_k, hidden, intermediate, experts, slices, multiprocessors
    most = max(
        launchers.moe_bytes(tokens, *sizes)
        for tokens in range(1, workspace.TOKENS_AT_ONCE + 1)
    )
    assert workspace.moe_bytes(*sizes) == most
