# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How an extending module stands in for upstream's (vllm/fork.py)."""

import importlib
import sys

import pytest

from tools.fork.compose import compose
from tools.fork.pins import REPO_ROOT

UPSTREAM = """
import os

_private = "private of upstream"
LIMIT = 1

class Layer:
    who = "upstream"

class Kept(Layer):
    pass

def helper():
    return "upstream"

def build():
    return Layer().who, helper(), LIMIT, _private
"""
FORK = """
from vllm.fork import extend
from vllm.m import part_upstream as upstream

class Layer(upstream.Layer):
    who = "fork, over " + upstream.Layer.who

class Added:
    pass

def helper():
    return "fork, over " + _helper()

_helper = upstream.helper
LIMIT = 2

extend(__name__, upstream)
"""


@pytest.fixture
def module(make_wheel, make_repo, pin_wheel, tmp_path, monkeypatch):
    """The fork's `vllm.m.part`, from a composed tree that stands alone on the path."""
    wheel = make_wheel({"vllm/m/__init__.py": "", "vllm/m/part.py": UPSTREAM})
    fork = (REPO_ROOT / "vllm" / "fork.py").read_text()
    repo = make_repo({"vllm/fork.py": fork, "vllm/m/part.py": FORK})
    compose("cpu", tmp_path / "out", link=False, repo=repo, pins=pin_wheel(wheel))
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_vllm(name)}
    yield importlib.import_module("vllm.m.part")
    for name in [name for name in sys.modules if _is_vllm(name)]:
        del sys.modules[name]
    sys.modules.update(real)


def _is_vllm(name: str) -> bool:
    return name.partition(".")[0] == "vllm"


def test_our_names_come_first(module):
    assert module.Layer.who == "fork, over upstream"
    assert module.helper() == "fork, over upstream"
    assert module.LIMIT == 2


def test_every_name_of_upstreams_is_there(module):
    from vllm.m.part import Added, Kept, _private, build, os  # noqa: F401

    assert _private == "private of upstream"
    assert {"Added", "Kept", "_private", "build"} <= set(dir(module))


def test_a_missing_name_is_missed_as_usual(module):
    with pytest.raises(AttributeError):
        _ = module.nothing
    assert not hasattr(module, "nothing")
    with pytest.raises(ImportError):
        from vllm.m.part import nothing  # noqa: F401


def test_upstreams_own_code_uses_our_classes_and_functions(module):
    layer, helper, limit, _ = module.build()
    assert (layer, helper) == ("fork, over upstream", "fork, over upstream")
    assert limit == 1, "a constant of ours must not reach upstream by itself"


def test_classes_that_upstream_derived_keep_their_base(module):
    upstream = sys.modules["vllm.m.part_upstream"]
    assert module.Kept.__mro__[1] is not module.Layer
    assert upstream.Layer is module.Layer


def test_an_assignment_reaches_both_halves(module, monkeypatch):
    monkeypatch.setattr(module, "_private", "replaced")
    monkeypatch.setattr(module, "LIMIT", 3)
    assert module.build()[2:] == (3, "replaced")
    monkeypatch.undo()
    assert module.build()[3] == "private of upstream"


def test_a_new_name_stays_ours(module):
    module.fresh = 1
    assert not hasattr(sys.modules["vllm.m.part_upstream"], "fresh")
