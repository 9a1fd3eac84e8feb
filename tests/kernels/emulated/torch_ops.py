# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""torch's CUDA ops of exl3, for tensors on the CPU: `cuda_ops.cpp` over the emulator.

What is left out of a real run is cuda_device.cpp alone. Workspaces are reserved as on a
GPU, and an op that was given too little refuses.
"""

import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

import exl3.ops  # noqa: F401  (registers the CPU's ops, which these replace)
from exl3 import workspace
from tests.kernels.emulated.build import (
    BLOCK_ROWS,
    CACHE,
    CSRC,
    ROOT,
    WORDS,
    Source,
    library,
)

_HERE = Path(__file__).parent
_LAUNCH = CSRC / "exl3" / "launch"
_TORCH = CSRC / "exl3" / "torch"
_OPS = ("arguments", "cuda_ops", "cuda_plans", "cuda_workspace")
_GPU = (90, 4)  # as in torch_device.cpp
_OLDEST_TORCH = "0x020B000000000000"  # as in CMakeLists.txt


def load() -> None:
    """Puts the emulated kernels in the place of the CPU's, for this process.

    torch warns once that the ops are registered anew.
    """
    kernels = _kernels()
    sources = [_TORCH / f"{name}.cpp" for name in _OPS]
    sources.append(_HERE / "torch_device.cpp")
    inputs = [*sources, kernels, *_TORCH.glob("*.h"), *(CSRC / "exl3").rglob("*.h")]
    newest = max(path.stat().st_mtime for path in inputs)
    target = CACHE / f"torch_ops-{kernels.stem}.so"
    if not target.exists() or target.stat().st_mtime < newest:
        command = ["g++", "-shared", "-std=c++17", "-O1", "-fPIC", "-Wall", "-Werror"]
        command += ["-fvisibility=hidden", "-DEXL3_EMU", "-DEXL3_OPS_DEVICE=CPU"]
        command += [f"-DTORCH_TARGET_VERSION={_OLDEST_TORCH}"]
        command += [f"-I{CSRC}", f"-I{ROOT}", "-isystem", include_paths()[0]]
        command += [str(path) for path in (*sources, kernels)]
        command += [f"-L{TORCH_LIB_PATH}", "-ltorch_cpu", "-o", str(target)]
        subprocess.run(command, check=True)
    torch.ops.load_library(str(target))
    workspace._is_needed = lambda device: True
    workspace.gpu = lambda device: _GPU


def _kernels() -> Path:
    """Every kernel and its launcher, for the emulator."""
    sources = []
    for path in sorted(_LAUNCH.glob("*.cu")):
        of_words = "<EXL3_WORDS>" in path.read_text()
        each = [(f"EXL3_WORDS={words}",) for words in WORDS] if of_words else [()]
        sources += [Source(path, defines) for defines in each]
    # The flags of EmulatedOps, whose objects these are then.
    defines = [
        f"EXL3_FOR_EACH_{name}(apply)=" + " ".join(f"apply({v})" for v in values)
        for name, values in (("WORDS", WORDS), ("BLOCK_ROWS", BLOCK_ROWS))
    ]
    return library("launch", sources, defines)
