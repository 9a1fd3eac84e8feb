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
#: Libraries that the image need not have, and whose they are.
OF_OTHERS = {
    "libcuda.so.1": "the driver's",
    "libfabric.so.1": "a transport of NVSHMEM's, as are libucp and libucs",
    "libucp.so.0": "",
    "libucs.so.0": "",
    "libmpi.so.40": "one who starts NVSHMEM, as are liboshmem and libpmix",
    "liboshmem.so.40": "",
    "libpmix.so.2": "",
    "librdmacm.so.1": "GPUDirect Storage's",
    "libtbb.so.12": "one of numba's ways to use threads",
}


def run(*words: str) -> subprocess.CompletedProcess:
    """Runs a command, with what it says on both streams in one."""
    return subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def missing_libraries() -> dict[str, set[str]]:
    """Libraries that are nowhere in the image, and who asks for them."""
    libraries = list(ENVIRONMENT.rglob("*.so*"))
    # The loader finds these by itself only once Python has loaded who they belong to.
    there = {library.name for library in libraries}
    missing: dict[str, set[str]] = {}
    for library in libraries:
        said = run("ldd", str(library)).stdout
        for name in set(re.findall(r"(\S+) => not found", said)) - there:
            missing.setdefault(name, set()).add(library.name)
    return missing


def main() -> None:
    """Prints what it finds, and stops at what should not be so."""
    runtime = read_stages(REPO / "docker" / "Dockerfile")["runtime"]
    assert os.getuid() == 1000
    Path("~/mine").expanduser().touch()
    for program in ("pip", "make", "nvcc"):
        assert shutil.which(program) is None, program
    print(run("du", "-sh", str(ENVIRONMENT)).stdout.strip())
    print("nvcc:", *ENVIRONMENT.rglob("bin/nvcc"))
    missing = missing_libraries()
    print("of others:", *sorted(missing))
    assert missing.keys() <= OF_OTHERS.keys(), missing

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
    print(f"the server ends with {ran.returncode}:\n{ran.stdout}")
    assert ran.returncode == 1
    assert "Traceback" not in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("error: no GPU was found")

    python, *words = json.loads(runtime.only("HEALTHCHECK").partition("CMD ")[2])
    ran = run(python, *words)
    print(f"health: {ran.returncode}, {ran.stdout.splitlines()[-1]}")
    assert ran.returncode != 0


if __name__ == "__main__":
    main()
