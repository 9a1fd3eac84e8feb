# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What the drift check finds in the fork's sources."""

import pytest

from tools.fork.drift_source import Sources
from tools.fork.drift_uses import find_uses
from tools.fork.errors import ForkError

LAYERS = """
from torch import nn

class Base(nn.Module):
    def inherited(self) -> None: ...
    def _hidden(self) -> None: ...

class Layer(Base):
    size: int = 1
    def __init__(self, config, prefix: str = "") -> None:
        self.width = config.width
    def forward(self, x): return x
    def load(self): return 0

class Other:
    def __init__(self): ...
    def run(self) -> "Layer": ...

class Kind(Enum):
    FIRST = "a"
    def layer(self) -> Layer: ...

def helper(a, b=1): return a
def _private(): ...
TABLE = {}
_cache = []
"""
UPSTREAM = {
    "vllm/m/__init__.py": "from .layers import Layer as Exported, helper\n",
    "vllm/m/layers.py": LAYERS,
    "vllm/m/stars.py": "from vllm.m.layers import *\n",
}
EXTEND = """
from vllm.fork import extend
from vllm.m import layers_upstream as upstream
{body}
extend(__name__, upstream)
"""
FORK = {"vllm/fork.py": "def extend(name, upstream): ...\n"}


@pytest.fixture
def uses_of(make_wheel, make_repo):
    """The uses in a fork, as {object: kinds}, of module vllm.m.layers."""

    def find(files):
        sources = Sources(make_wheel(UPSTREAM), make_repo({**FORK, **files}))
        found = find_uses(sources)
        assert {module for module, _ in found} <= {"vllm.m.layers"}
        return {name: set(use.kinds) for (_, name), use in found.items()}

    return find


@pytest.fixture
def uses_in(uses_of):
    """The uses in one module that the fork adds."""
    return lambda text: uses_of({"vllm/ours.py": text})


@pytest.fixture
def uses_extending(uses_of):
    """The uses in the fork's own vllm/m/layers.py."""
    return lambda body: uses_of({"vllm/m/layers.py": EXTEND.format(body=body)})


@pytest.mark.parametrize(
    "text",
    [
        "from vllm.m.layers import helper",
        "from vllm.m.layers import helper as renamed",
        "from vllm.m import helper",  # re-exported by the package
        "from vllm.m.stars import helper",  # re-exported by a star
        "from .m.layers import helper",
        "import vllm.m.layers as l\nl.helper(1)",
        "import vllm.m.layers\nvllm.m.layers.helper(1)",
        "from vllm.m import layers\nlayers.helper(1)",
        "from vllm.m import layers\nf = getattr(layers, 'helper')",
        "def f():\n    from vllm.m.layers import helper\n    return helper",
        "try:\n    from vllm.m.layers import helper\nexcept ImportError:\n    pass",
    ],
)
def test_every_spelling_of_an_import_is_resolved(uses_in, text):
    assert uses_in(text) == {"helper": {"call"}}


def test_a_private_name_is_found(uses_in):
    assert uses_in("from vllm.m import layers\nlayers._cache.append(1)") == {
        "_cache": {"call"}
    }


def test_an_instance_leads_to_its_constructor_and_methods(uses_in):
    assert uses_in("from vllm.m.layers import Other\nOther().run().load()") == {
        "Other": {"call"},
        "Other.__init__": {"call"},
        "Other.run": {"call"},
        "Layer.load": {"call"},  # by the return annotation
    }


@pytest.mark.parametrize(
    "parameter",
    ["x: Layer", 'x: "Layer"', "x: Layer | None", "x: Optional[Layer]", "*, x: Layer"],
)
def test_annotations_tell_whose_attribute_it_is(uses_in, parameter):
    text = f"""
from typing import Optional
from vllm.m.layers import Layer
def f({parameter}):
    return x._hidden, x.width
"""
    assert uses_in(text) == {
        "Layer": {"call"},
        "Base._hidden": {"call"},
        "Layer.width": {"call"},
    }


def test_a_member_of_an_enum_has_its_methods(uses_in):
    text = """
from vllm.m.layers import Kind
def f():
    first, other = Kind.FIRST, 1
    return first.layer().size
"""
    assert uses_in(text) == {
        "Kind": {"call"},
        "Kind.FIRST": {"call"},
        "Kind.layer": {"call"},
        "Layer.size": {"call"},
    }


def test_patches_are_found(uses_in):
    text = """
import copy
from vllm.m import layers
from vllm.m.layers import Other, Layer
layers.helper = None
Other.run = None
setattr(layers, "_private", None)
layers.TABLE["a"] = 1
def f(x: Layer):
    view = copy.copy(x)
    view.width = 2
"""
    found = uses_in(text)
    assert {name for name, kinds in found.items() if "patch" in kinds} == {
        "helper",
        "Other.run",
        "_private",
        "TABLE",
        "Layer.width",
    }


def test_a_subclass_uses_what_it_overrides_and_reaches(uses_extending):
    found = uses_extending("""
class Layer(upstream.Layer):
    def __init__(self, config, prefix=""):
        super().__init__(config, prefix)
        self.width = 2
    def inherited(self):
        return self.size + self._hidden()
""")
    assert found == {
        "Layer": {"call", "extend", "subclass"},  # read, replaced, derived from
        "Layer.__init__": {"call", "extend", "subclass"},
        "Layer.forward": {"subclass"},
        "Layer.load": {"subclass"},
        "Layer.width": {"patch"},
        "Layer.size": {"call"},
        "Base.inherited": {"extend"},
        "Base._hidden": {"call"},
    }


def test_a_replaced_function_is_found(uses_extending):
    found = uses_extending("def helper(a, b=1): return upstream.helper(a, b)")
    assert found == {"helper": {"call", "extend"}}


def test_a_name_of_the_fork_is_not_a_use(uses_of):
    found = uses_of(
        {
            "vllm/m/layers.py": EXTEND.format(body="def mine(): ..."),
            # Through the fork's module, which offers upstream's names as well.
            "vllm/ours.py": "from vllm.m.layers import mine, _private\n",
        }
    )
    assert found == {"_private": {"call"}}


def test_a_mixin_is_read_for_each_class_that_it_is_mixed_into(uses_extending):
    found = uses_extending("""
class Mixin:
    def load(self):
        return super().load(), self._hidden()

class Layer(Mixin, upstream.Layer):
    pass
""")
    assert found["Layer.load"] == {"call", "extend", "subclass"}
    assert found["Base._hidden"] == {"call"}


def test_a_mixin_of_a_mixin_is_read_as_well(uses_extending):
    found = uses_extending("""
class First:
    def load(self):
        return super().load()

class Second(First):
    def __init__(self, config):
        super(First, self).__init__(config)

class Layer(Second, upstream.Layer):
    pass
""")
    assert found["Layer.load"] == {"call", "extend", "subclass"}
    assert found["Layer.__init__"] == {"call", "extend", "subclass"}


def test_classes_inside_functions_count(uses_in):
    found = uses_in("""
from vllm.m.layers import Layer
def make():
    class Local(Layer):
        def load(self):
            return super().load() + self.width
    return Local
""")
    assert found["Layer"] == {"call", "subclass"}
    assert found["Layer.load"] == {"call", "extend", "subclass"}
    assert found["Layer.width"] == {"call"}


def test_a_local_name_hides_an_imported_one(uses_in):
    text = """
from vllm.m.layers import Other
def f(Other):
    return Other.run
g = [Other.run for Other in ()]
"""
    assert uses_in(text) == {"Other": {"call"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from vllm.m.layers import missing", r":1: vllm\.m\.layers has no missing"),
        ("import vllm.m.missing", r":1: upstream has no module vllm\.m\.missing"),
        ("\ndef f(x):\n    return x._hidden", r":3: cannot tell whose _hidden is used"),
        ("\ndef f(x):\n    x._hidden = 1", r":3: cannot tell whose _hidden is used"),
        (
            "from vllm.m.layers import Other\ndef f(x: Other):\n    return x._none",
            r":3: cannot tell whose _none is used",
        ),
    ],
)
def test_what_cannot_be_resolved_is_refused_by_place(uses_in, text, message):
    with pytest.raises(ForkError, match=r"^vllm/ours\.py" + message):
        uses_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C._private()",
        "import torch\ndef f(x: torch.Tensor):\n    return x._base",
        "class Mine:\n    _x = 1\ndef f(a):\n    return a._x",
        "from torch import nn\nclass A(nn.Module):\n    def f(s):\n        s._buffers",
    ],
)
def test_private_names_that_are_not_upstreams_are_no_business_of_ours(uses_in, text):
    assert uses_in(text) == {}
