# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The two rules, and every collision that neither covers."""

import pytest

from tools.fork.errors import ForkError
from tools.fork.overlay import fork_files, plan_overlay

UPSTREAM = {
    "vllm/__init__.py",
    "vllm/_C.abi3.so",
    "vllm/m/__init__.py",
    "vllm/m/cpu.py",
    "vllm/m/config.json",
    "vllm/taken.py",
    "vllm/taken_upstream.py",
    "vllm/bare/inside.py",  # a folder without an __init__.py
}


@pytest.fixture
def plan(make_repo):
    return lambda files: plan_overlay(make_repo(files), UPSTREAM)


@pytest.mark.parametrize(
    "path",
    ["vllm/new.py", "vllm/m/new.py", "vllm/new/__init__.py", "exl3/a", "vllm/m/x.json"],
)
def test_a_file_where_upstream_has_none_is_added(plan, path):
    overlay = plan({path: ""})
    assert (overlay.added, overlay.extended) == ((path,), ())


@pytest.mark.parametrize(
    "text",
    [
        "from vllm.m import cpu_upstream as upstream",
        "from vllm.m.cpu_upstream import Thing",
        "import vllm.m.cpu_upstream",
        "from . import cpu_upstream",
        "from .cpu_upstream import *",
        "from ..m.cpu_upstream import Thing",
        "def f():\n    from vllm.m import cpu_upstream",
    ],
)
def test_a_module_that_imports_its_sibling_extends(plan, text):
    overlay = plan({"vllm/m/cpu.py": text})
    assert (overlay.added, overlay.extended) == ((), ("vllm/m/cpu.py",))


def test_a_package_is_extended_by_its_init(plan):
    overlay = plan({"vllm/m/__init__.py": "from .init_upstream import *"})
    assert overlay.extended == ("vllm/m/__init__.py",)


_NOT_EXTENDING = "upstream has a file there and ours does not extend it; import "
_SHADOWS = "would shadow upstream's "


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("vllm/m/cpu.py", "", _NOT_EXTENDING + "vllm.m.cpu_upstream in it"),
        ("vllm/m/__init__.py", "", _NOT_EXTENDING + "vllm.m.init_upstream in it"),
        ("vllm/m/config.json", "{}", "upstream has a file there"),
        # Another module's sibling is not one's own.
        ("vllm/m/cpu.py", "import vllm.cpu_upstream", _NOT_EXTENDING),
        ("vllm/m/gone.py", "from . import gone_upstream", "extends a module that up"),
        ("vllm/taken.py", "from . import taken_upstream", "vllm/taken_upstream.py is"),
        ("vllm/m.py", "", _SHADOWS + "vllm/m/__init__.py; rename it"),
        ("vllm/bare.py", "", _SHADOWS + "vllm/bare/inside.py"),
        ("vllm/m/cpu/__init__.py", "", _SHADOWS + "vllm/m/cpu.py"),
        ("vllm/m/cpu/deep/x.py", "", _SHADOWS + "vllm/m/cpu.py"),
        ("vllm/_C.py", "", _SHADOWS + "vllm/_C.abi3.so"),
        ("vllm/new.py", "def", "line 1: "),
    ],
)
def test_every_other_collision_is_refused(plan, path, text, message):
    with pytest.raises(ForkError) as refusal:
        plan({path: text})
    assert str(refusal.value).startswith(f"{path}: {message}")
    assert "\n" not in str(refusal.value)


def test_a_sibling_of_the_forks_own_is_refused(plan):
    with pytest.raises(ForkError, match=r"vllm/m/cpu_upstream\.py is taken"):
        plan(
            {
                "vllm/m/cpu.py": "from . import cpu_upstream",
                "vllm/m/cpu_upstream.py": "",
            }
        )


def test_importing_another_modules_sibling_is_no_extension(plan):
    overlay = plan({"vllm/cpu.py": "from vllm.m import cpu_upstream"})
    assert overlay.added == ("vllm/cpu.py",)


def test_only_sources_are_shipped(make_repo):
    repo = make_repo(
        {
            "vllm/a.py": "",
            "vllm/__pycache__/a.cpython-311.pyc": "",
            "vllm/a.py~": "",
            "vllm/.a.py.swp": "",
            "exl3/_C.abi3.so": "",
            "tests/t.py": "",
            "README.md": "",
        }
    )
    assert fork_files(repo) == ["vllm/a.py"]


def test_a_file_in_another_encoding_is_named(make_repo):
    repo = make_repo({"vllm/new.py": ""})
    (repo / "vllm/new.py").write_bytes(b"NAME = '\xe9'\n")
    with pytest.raises(ForkError, match=r"^vllm/new\.py: is no Python source \("):
        plan_overlay(repo, UPSTREAM)
