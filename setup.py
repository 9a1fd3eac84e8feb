# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Builds the fork: composes it on upstream's wheel and compiles the library's ops.

`VLLM_TARGET_DEVICE` chooses the target: cpu, cuda or empty (see tools/fork/pins.py).
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import cmake
import ninja
from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import _StaticPth, editable_wheel
from setuptools.extension import Extension

REPO = Path(__file__).resolve().parent
sys.path.insert(0, str(REPO))  # build front ends do not put the project on the path

from tools.fork.compose import compose, describe  # noqa: E402
from tools.fork.errors import ForkError  # noqa: E402
from tools.fork.metadata import (  # noqa: E402
    library_metadata,
    read_metadata,
    unpack_licences,
)
from tools.fork.pins import load_pins, select_machine, select_target  # noqa: E402
from tools.fork.wheel import obtain_wheel  # noqa: E402

OPS = Path("exl3") / "_C.abi3.so"
BUILD = REPO / "build"


def wants_cuda() -> bool:
    """Whether the ops get their CUDA kernels: EXL3_CUDA says, else the target."""
    said = os.environ.get("EXL3_CUDA", "1" if TARGET == "cuda" else "0")
    if said not in ("0", "1"):
        raise SystemExit(f"error: EXL3_CUDA={said!r}: write 1 or 0")
    return said == "1"


class ComposeFork(build_py):
    """Puts the composed tree where setuptools collects Python files."""

    def run(self) -> None:
        """Composes; an editable build into a folder of links that stays."""
        out = EDITABLE_TREE if self.editable_mode else Path(self.build_lib).resolve()
        try:
            overlay = compose(TARGET, out, link=self.editable_mode)
        except ForkError as error:
            raise SystemExit(f"error: {error}") from error
        print(describe(overlay))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Files made, for setuptools' record; an editable build makes none."""
        root = Path(self.build_lib)
        return [] if self.editable_mode else [str(p) for p in root.rglob("*")]

    def get_output_mapping(self) -> dict[str, str]:
        """None: nothing is built in place."""
        return {}


class CompileOps(build_ext):
    """Builds `exl3/_C.abi3.so` with CMake and ninja."""

    def run(self) -> None:
        """Compiles, and puts the library beside exl3's Python files."""
        cuda = "ON" if wants_cuda() else "OFF"
        folder = BUILD / f"cmake-{sysconfig.get_platform()}-cuda-{cuda.lower()}"
        # The build environment's own cmake and ninja: a system's may be too old.
        cmake_command = str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
        configure = [cmake_command, "-S", str(REPO), "-B", str(folder), "-G", "Ninja"]
        configure += [
            "--fresh",  # a cache would remember the last build's environment
            "--log-level=NOTICE",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DEXL3_CUDA={cuda}",
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
        ]
        try:
            subprocess.run(configure, check=True)
            subprocess.run([cmake_command, "--build", str(folder)], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit("error: exl3/_C did not compile; see above") from error
        built = folder / OPS.name
        if self.editable_mode:
            # Once in the repository, because Python finds the `exl3` of the working
            # directory first, and once in the composed tree, because it need not.
            # Put in place by renaming: processes that run keep the old one.
            fresh = (REPO / OPS).with_suffix(".new")
            shutil.copyfile(built, fresh)
            fresh.replace(REPO / OPS)
            link = EDITABLE_TREE / OPS
            link.unlink(missing_ok=True)
            link.symlink_to(REPO / OPS)
        else:
            target = Path(self.build_lib) / OPS
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(built, target)

    def get_outputs(self) -> list[str]:
        """The library, for setuptools' record."""
        return [] if self.editable_mode else [str(Path(self.build_lib) / OPS)]

    def get_output_mapping(self) -> dict[str, str]:
        """None: nothing is built in place."""
        return {}


class EditableFork(editable_wheel):
    """An editable install that puts the composed tree on the path.

    setuptools' own finder cannot: `vllm/` in the repository is no package, and the
    rest of vLLM lies elsewhere.
    """

    def _select_strategy(self, name, tag, build_lib):
        return _StaticPth(self.distribution, name, [EDITABLE_TREE])


class ForkDistribution(Distribution):
    """Has Python modules and a compiled one, though neither is listed here."""

    def has_pure_modules(self) -> bool:
        """True, so that build_py runs."""
        return True

    def has_ext_modules(self) -> bool:
        """True, so that build_ext runs and the wheel is for one platform."""
        return True


try:
    PINS = load_pins()
    TARGET = select_target()
    LICENCES = ["LICENSE"]
    METADATA = library_metadata()
    if TARGET != "empty":
        WHEEL = obtain_wheel(PINS.wheel(TARGET, select_machine()), PINS.version)
        METADATA = read_metadata(WHEEL, PINS)
        LICENCES += [
            str(path.relative_to(REPO))
            for path in unpack_licences(WHEEL, BUILD / "licences" / "vllm")
        ]
except ForkError as error:
    raise SystemExit(f"error: {error}") from error
EDITABLE_TREE = BUILD / f"composed-{TARGET}"

setup(
    name=METADATA.name,
    version=PINS.fork_version(TARGET),
    description="vLLM with unequal expert widths and EXL3 (trellis) quantization",
    long_description=(REPO / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=LICENCES,
    python_requires=">=3.11,<3.15",
    install_requires=METADATA.requirements,
    extras_require=METADATA.extras,
    entry_points=METADATA.entry_points,
    packages=[],
    py_modules=[],
    ext_modules=[Extension("exl3._C", sources=[])],
    distclass=ForkDistribution,
    cmdclass={
        "build_py": ComposeFork,
        "build_ext": CompileOps,
        "editable_wheel": EditableFork,
    },
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
