# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How a fork module stands in for the upstream module that it extends.

The last line of every extending module is `extend(__name__, upstream)`.
"""

import sys
from types import ModuleType
from typing import Any


class _ExtendingModule(ModuleType):
    """A module in two halves: the fork's names first, then upstream's.

    Assignments reach both halves. Upstream's functions read their globals from
    upstream's half, so a test that replaces a name here is seen by them too.
    """

    _upstream: ModuleType

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if hasattr(self._upstream, name) and not name.startswith("__"):
            self._replaced.setdefault(name, getattr(self._upstream, name))
            setattr(self._upstream, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in self._replaced:
            setattr(self._upstream, name, self._replaced.pop(name))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._upstream)})


def extend(name: str, upstream: ModuleType) -> None:
    """Makes module `name` offer everything of `upstream`, with its own names first.

    Each class and function that the fork defines under a name of upstream's also
    replaces it inside the upstream module, where upstream's code names it. Classes
    that upstream derived from the original keep the original as their base.

    Args:
        name: `__name__` of the fork's module.
        upstream: The upstream module that stands beside it.
    """
    module = sys.modules[name]
    for attribute, value in vars(module).items():
        own = getattr(value, "__module__", None) == name
        if own and hasattr(upstream, attribute):
            setattr(upstream, attribute, value)
    module.__dict__.update(_upstream=upstream, _replaced={})
    module.__class__ = _ExtendingModule
