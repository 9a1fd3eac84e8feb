# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Checks inside the CUDA image what it can do without a GPU; see cuda_image.sh."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dockerfile import read_stages

REPO = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path("/opt/vllm")
DEMO = REPO / "examples" / "demo-glm-dsa-ragged-exl3"
#: Libraries that only the driver brings, and those that no package of ours would use.
OF_OTHERS = re.compile(r"libcuda\.so\.1|libnvidia-ml\.so\.1")


def run(*words: str) -> subprocess.CompletedProcess:
    """Runs a command, with what it says on both streams in one."""
    return subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def missing_libraries() -> dict[str, list[str]]:
    """Libraries that are in no folder of the loader's, and who asks for them."""
    missing: dict[str, list[str]] = {}
    for library in ENVIRONMENT.rglob("*.so*"):
        for name in re.findall(r"(\S+) => not found", run("ldd", str(library)).stdout):
            missing.setdefault(name, []).append(library.name)
    return missing


def main() -> None:
    """Prints what it finds, and stops at what should not be so."""
    runtime = read_stages(REPO / "docker" / "Dockerfile")["runtime"]
    assert os.getuid() == 1000
    Path("~/mine").expanduser().touch()
    for program in ("pip", "make", "nvcc"):
        assert shutil.which(program) is None, program
    print(run("du", "-sh", str(ENVIRONMENT)).stdout.strip())
    print("nvcc in:", *ENVIRONMENT.rglob("bin/nvcc"))
    for name, users in sorted(missing_libraries().items()):
        print(f"not there: {name}, for {len(users)}: {', '.join(users[:3])}")

    for name in ("torch", "vllm", "exl3.ops", "ray", "triton", "flashinfer"):
        module = importlib.import_module(name)
        print(f"import {name}", getattr(module, "__version__", ""))
    assert Path(sys.modules["vllm"].__file__).is_relative_to(ENVIRONMENT)

    entry = json.loads(runtime.only("ENTRYPOINT"))
    for words in (
        [*entry, "--help"],
        ["vllm", "exl3", "--help"],
        ["exl3", "--help"],
        ["exl3", "inspect", str(DEMO)],
        ["hf", "--help"],
        ["ray", "--version"],
    ):
        ran = run(*words)
        print(f"{' '.join(words)}: {ran.returncode}, {len(ran.stdout)} characters")
        assert ran.returncode == 0, ran.stdout

    ran = run(*entry, "--model", str(DEMO))
    print(f"the server ends with {ran.returncode}:\n{ran.stdout[-6000:]}")
    assert ran.returncode != 0

    python, *words = json.loads(runtime.only("HEALTHCHECK").partition("CMD ")[2])
    ran = run(python, *words)
    print(f"health: {ran.returncode}, {ran.stdout.splitlines()[-1]}")
    assert ran.returncode != 0


if __name__ == "__main__":
    main()
