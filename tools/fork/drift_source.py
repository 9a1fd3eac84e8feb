# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads vLLM as syntax trees, without importing it, and finds where a name is defined.

The modules are those of an upstream wheel, or those of the composed fork: the wheel's
with the fork's files at their paths and upstream's siblings beside them.
"""

import ast
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

from tools.fork.errors import ForkError
from tools.fork.overlay import (
    imported_module,
    module_name,
    plan_overlay,
    upstream_sibling,
)

PACKAGE = "vllm"
_DEFINITION = re.compile(r"^(?:class|(?:async )?def) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Ref:
    """What a name stands for: a module, or an object that a module defines."""

    module: str
    name: str = ""  # dotted, such as "DeepseekV2MoE.forward"; empty: the module
    instance: bool = False  # an instance of the class, not the class
    bases_only: bool = False  # the class as `super()` sees it

    def member(self, name: str) -> "Ref":
        """The object `name` inside this one."""
        return Ref(self.module, f"{self.name}.{name}" if self.name else name)


@dataclass(frozen=True)
class Module:
    """One module, parsed."""

    name: str  # where it stands, such as "vllm.platforms.cpu_upstream"
    path: str  # where its owner keeps it, such as "vllm/platforms/cpu.py"
    from_upstream: bool
    tree: ast.Module

    @cached_property
    def package(self) -> str:
        """What the relative imports in this module start from."""
        is_package = PurePosixPath(self.path).stem == "__init__"
        if is_package and not self.name.endswith("_upstream"):
            return self.name
        return self.name.rpartition(".")[0]

    @cached_property
    def bindings(self) -> dict[str, list[ast.AST]]:
        """The statements that bind each name of the module."""
        return bindings_of(self.tree.body)


def bindings_of(body: list[ast.stmt]) -> dict[str, list[ast.AST]]:
    """The statements of a module's or a class's body by the name that they bind.

    A name may be bound more than once: in the branches of an `if` or a `try`, or by
    overloads. Star imports are kept under "*".
    """
    found: dict[str, list[ast.AST]] = {}
    for node in _flatten(body):
        for name in _bound_names(node):
            found.setdefault(name, []).append(node)
    return found


class Sources:
    """Every module of upstream, or of the composed fork."""

    def __init__(self, wheel: Path, repo: Path | None = None) -> None:
        """Opens a wheel.

        Args:
            wheel: An upstream wheel.
            repo: The fork's repository, to read the composed fork; upstream alone if
                not given.

        Raises:
            ForkError: The file is no wheel of vLLM, or the fork breaks a rule.
        """
        try:
            self._archive = zipfile.ZipFile(wheel)
        except (OSError, zipfile.BadZipFile) as error:
            raise ForkError(f"{wheel}: {error}") from error
        files = set(self._archive.namelist())
        if f"{PACKAGE}/__init__.py" not in files:
            raise ForkError(f"{wheel}: has no {PACKAGE}/__init__.py; it is not vLLM")
        self.upstream = {
            module_name(path): path
            for path in files
            if path.endswith(".py") and path.startswith(f"{PACKAGE}/")
        }
        self._compiled = {  # such as "vllm._C"
            path.partition(".")[0].replace("/", ".")
            for path in files
            if path.endswith(".so")
        }
        self._repo = repo
        self._upstream_at = dict(self.upstream)
        self.fork: dict[str, str] = {}
        if repo:
            overlay = plan_overlay(repo, files)
            for path in overlay.extended:
                sibling = module_name(upstream_sibling(path))
                self._upstream_at[sibling] = self._upstream_at.pop(module_name(path))
            self.fork = {
                module_name(path): path
                for path in (*overlay.added, *overlay.extended)
                if path.endswith(".py") and path.startswith(f"{PACKAGE}/")
            }
        self._names = {
            ".".join(name.split(".")[:depth])
            for names in (self.fork, self._upstream_at, self._compiled)
            for name in names
            for depth in range(1, name.count(".") + 2)
        }
        self.module = cache(self._read)
        #: For a mixin of the fork, the bases that stand after it in a class it is
        #: mixed into. Set by whoever walks the mixin for that class.
        self.mixed_before: dict[Ref, list[Ref]] = {}

    def close(self) -> None:
        """Closes the wheel."""
        self._archive.close()

    def is_module(self, name: str) -> bool:
        """Whether there is a module or package of that name."""
        return name in self._names

    def sibling(self, name: str) -> str | None:
        """The upstream module beside a module of the fork that extends it."""
        if name not in self.fork:
            return None
        beside = module_name(upstream_sibling(self.fork[name]))
        return beside if beside in self._upstream_at else None

    def _read(self, name: str) -> Module | None:
        if name in self.fork:
            assert self._repo
            path = self.fork[name]
            text = (self._repo / path).read_text()
            return Module(name, path, False, ast.parse(text))
        if name in self._upstream_at:
            path = self._upstream_at[name]
            return Module(name, path, True, ast.parse(self._archive.read(path)))
        return None

    def upstream_key(self, ref: Ref) -> tuple[str, str] | None:
        """Upstream's module and the object's name, or None if it is the fork's."""
        module = self.module(ref.module)
        if not module or not module.from_upstream:
            return None
        return module_name(module.path), ref.name

    @cached_property
    def homes(self) -> dict[str, list[str]]:
        """Upstream's modules by the names of the classes and functions they define."""
        found: dict[str, list[str]] = {}
        for module, path in sorted(self.upstream.items()):
            text = self._archive.read(path).decode()
            for name in _DEFINITION.findall(text):
                found.setdefault(name, []).append(module)
        return found

    def definition(self, ref: Ref) -> list[ast.AST]:
        """The statements that define an object; empty if there are none."""
        module = self.module(ref.module)
        if not module or not ref.name:
            return []
        head, *rest = ref.name.split(".")
        nodes = module.bindings.get(head, [])
        for part in rest:
            nodes = [
                found
                for node in nodes
                if isinstance(node, ast.ClassDef)
                for found in own_members(node).get(part, [])
            ]
        return nodes

    def lookup(
        self, module_at: str, name: str, seen: frozenset[Ref] = frozenset()
    ) -> Ref | None:
        """Follows a module's name through re-exports to where it is defined."""
        here = Ref(module_at, name)
        module = self.module(module_at)
        if here in seen:
            return None
        seen |= {here}
        nodes = module.bindings.get(name, []) if module else []
        if any(not isinstance(node, ast.Import | ast.ImportFrom) for node in nodes):
            return here
        for node in nodes:
            assert module
            if found := self.imported(module, node, name, seen):
                return found
        if self.is_module(f"{module_at}.{name}"):
            return Ref(f"{module_at}.{name}")
        for node in module.bindings.get("*", []) if module else []:
            assert module and isinstance(node, ast.ImportFrom)
            source = imported_module(module.package, node)
            if found := self.lookup(source, name, seen):
                return found
        # `extend` offers every name of the sibling that the fork does not define.
        sibling = self.sibling(module_at)
        return self.lookup(sibling, name, seen) if sibling else None

    def imported(
        self,
        module: Module,
        node: ast.AST,
        name: str,
        seen: frozenset[Ref] = frozenset(),
    ) -> Ref | None:
        """What an import statement binds `name` to; None if it lies outside vLLM."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                if bound == name and alias.name.partition(".")[0] == PACKAGE:
                    return Ref(alias.name if alias.asname else PACKAGE)
        elif isinstance(node, ast.ImportFrom):
            source = imported_module(module.package, node)
            for alias in node.names:
                if (alias.asname or alias.name) == name and self.is_module(source):
                    return self.lookup(source, alias.name, seen)
        return None

    def bases(self, ref: Ref) -> list[Ref]:
        """The bases of a class that are classes of vLLM."""
        found = []
        for node in self.definition(ref):
            for base in node.bases if isinstance(node, ast.ClassDef) else []:
                if isinstance(base, ast.Subscript):  # Generic[T]
                    base = base.value
                if target := self.dotted(ref.module, base):
                    found.append(self.unalias(target))
        return found + self.mixed_before.get(Ref(ref.module, ref.name), [])

    def unalias(self, ref: Ref) -> Ref:
        """Follows `Name = OtherName` to the other."""
        nodes = self.definition(ref)
        if len(nodes) == 1 and isinstance(nodes[0], ast.Assign):
            target = self.dotted(ref.module, nodes[0].value)
            if target and target != ref and self.is_class(target):
                return target
        return ref

    def is_class(self, ref: Ref) -> bool:
        """Whether an object is defined by a class statement."""
        return any(isinstance(node, ast.ClassDef) for node in self.definition(ref))

    def dotted(self, module_at: str, node: ast.AST) -> Ref | None:
        """What `a.b.c` stands for at the top level of a module."""
        if isinstance(node, ast.Name):
            return self.lookup(module_at, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(module_at, node.value)
            return self.member(owner, node.attr) if owner else None
        return None

    def member(self, ref: Ref, name: str) -> Ref | None:
        """An attribute of a module, or of a class through its bases.

        Bases are searched depth first, which finds what Python's order finds except
        in diamonds.
        """
        if not ref.name:
            return self.lookup(ref.module, name)
        own = Ref(ref.module, ref.name).member(name)
        if not ref.bases_only and self.definition(own):
            return own
        for base in self.bases(ref):
            if found := self.member(base, name):
                return found
        return None


@cache
def own_members(node: ast.ClassDef) -> dict[str, list[ast.AST]]:
    """What a class itself defines: its body's names, then `self.name = ...`."""
    found = bindings_of(node.body)
    assigned: dict[str, list[ast.AST]] = {}
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for inner in ast.walk(method):
            for target in _targets(inner):
                if isinstance(target, ast.Attribute) and (
                    isinstance(target.value, ast.Name) and target.value.id == "self"
                ):
                    assigned.setdefault(target.attr, []).append(inner)
    return {**assigned, **found}


def _flatten(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements with those inside `if`, `try`, `with` and loops in their place."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody"):
            if not isinstance(node, _SCOPES):
                yield from _flatten(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from _flatten(handler.body)


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _targets(node: ast.AST) -> list[ast.expr]:
    """The expressions that a statement assigns to."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        return []
    return [
        part
        for target in targets
        for part in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, _SCOPES):
        return [node.name]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [target.id for target in _targets(node) if isinstance(target, ast.Name)]
