# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Tells, as far as annotations allow, what class the value of an expression has."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace

from tools.fork.drift_source import Ref, Sources

#: Anything that is not vLLM's.
EXTERNAL = Ref("")
#: Annotations that say nothing.
_ANYTHING = ("Any", "object")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Types:
    """Classes of values, from annotations and from `self.x = parameter`."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._asked: list[Ref] = []  # values whose class is being told, to end loops

    def attribute(self, owner: Ref | None, name: str) -> Ref | None:
        """What `owner.name` stands for; None if that cannot be told."""
        if owner is None or owner == EXTERNAL:
            return owner
        if not owner.name:
            return self._sources.member(owner, name)
        held = self._class_of(owner)
        if held is None or held == EXTERNAL:
            return held
        if found := self._sources.member(held, name):
            return found
        return EXTERNAL if self._has_foreign_base(held) else None

    def result(self, called: Ref | None) -> Ref | None:
        """What a call returns."""
        if called is None or called == EXTERNAL:
            return called
        if self._sources.is_class(called) and not called.instance:
            return replace(called, instance=True)
        for node in self._sources.definition(called):
            if isinstance(node, _FUNCTIONS) and node.returns:
                return self.annotation(called.module, node.returns)
        return None

    def called_methods(self, called: Ref) -> Iterator[Ref]:
        """The methods that calling a class or an instance runs."""
        held = called if self._sources.is_class(called) else None
        names = ["__init__", "__new__"]
        if held is None or called.instance:
            if not any(
                isinstance(node, _FUNCTIONS)
                for node in self._sources.definition(called)
            ):
                held = self._class_of(called)
            names = ["__call__", "forward"]
        if held and held != EXTERNAL:
            for name in names:
                if method := self._sources.member(held, name):
                    yield method

    def annotation(
        self,
        module_at: str,
        node: ast.expr,
        name: Callable[[str], Ref | None] | None = None,
    ) -> Ref | None:
        """The value that an annotation in a module describes.

        Args:
            module_at: The module where the annotation stands.
            node: The annotation.
            name: Looks a name up where functions import names of their own.
        """
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return EXTERNAL
        if isinstance(node, ast.BinOp):  # X | None
            left = self.annotation(module_at, node.left, name)
            right = self.annotation(module_at, node.right, name)
            return left if left != EXTERNAL else right
        if isinstance(node, ast.Subscript):
            word = node.value.id if isinstance(node.value, ast.Name) else ""
            inner = self.annotation(module_at, node.slice, name)
            if word in ("Optional", "ClassVar", "Final"):
                return inner
            if word in ("type", "Type"):
                return replace(inner, instance=False) if inner else None
            return EXTERNAL
        if isinstance(node, ast.Name) and node.id in _ANYTHING:
            return None
        if isinstance(node, ast.Name) and name:
            target = name(node.id)
        else:
            target = self._sources.dotted(module_at, node)
        return replace(target, instance=True) if target else EXTERNAL

    def is_foreign(self, module_at: str, name: str) -> bool:
        """Whether a module gets a name from outside vLLM, or is not Python."""
        module = self._sources.module(module_at)
        return name in module.bindings if module else self._sources.is_module(module_at)

    def _class_of(self, value: Ref) -> Ref | None:
        """The class whose attributes a value has."""
        if self._sources.is_class(value):
            return value
        if value in self._asked:
            return None
        self._asked.append(value)
        try:
            return self._declared_class(value)
        finally:
            self._asked.pop()

    def _declared_class(self, value: Ref) -> Ref | None:
        owner = Ref(value.module, value.name.rpartition(".")[0])
        if owner.name and self._is_enum(owner):
            return replace(owner, instance=True)
        for node in self._sources.definition(value):
            if isinstance(node, ast.AnnAssign):
                return self.annotation(value.module, node.annotation)
            if isinstance(node, _FUNCTIONS) and node.returns and _is_property(node):
                return self.annotation(value.module, node.returns)
            if isinstance(node, ast.Assign):
                return self._assigned(value, node)
        return None

    def _assigned(self, target: Ref, node: ast.Assign) -> Ref | None:
        """Class of a value from the assignment that makes it."""
        value = node.value
        if isinstance(value, ast.Call):
            return self.result(self._sources.dotted(target.module, value.func))
        names: list[str] = []
        while isinstance(value, ast.Attribute):
            names.insert(0, value.attr)
            value = value.value
        if not isinstance(value, ast.Name):
            return None
        held = self._parameter(target, node, value.id)
        for name in names:
            held = self.attribute(held, name)
        return self._class_of(held) if held and held != EXTERNAL else held

    def _parameter(self, target: Ref, node: ast.AST, name: str) -> Ref | None:
        """A name inside the method that assigns `self.x`, or at the top of a module."""
        owner = Ref(target.module, target.name.rpartition(".")[0])
        for held in self._sources.definition(owner) if owner.name else []:
            for method in held.body if isinstance(held, ast.ClassDef) else []:
                if not isinstance(method, _FUNCTIONS) or node not in ast.walk(method):
                    continue
                for arg in (*method.args.args, *method.args.kwonlyargs):
                    if arg.arg == name and arg.annotation:
                        return self.annotation(target.module, arg.annotation)
                if name == "self":
                    return replace(owner, instance=True)
        return self._sources.lookup(target.module, name)

    def _is_enum(self, held: Ref) -> bool:
        return any(
            ast.unparse(base).endswith("Enum")
            for node in self._sources.definition(held)
            for base in (node.bases if isinstance(node, ast.ClassDef) else [])
        )

    def _has_foreign_base(self, held: Ref) -> bool:
        """Whether a class inherits from a class that is not vLLM's."""
        for node in self._sources.definition(held):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = self._sources.bases(held)
            if len(bases) < len(node.bases):
                return True
            return any(self._has_foreign_base(base) for base in bases)
        return False


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.endswith("property") for name in names)
