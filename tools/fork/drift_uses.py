# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Finds every upstream object that the fork's sources stand on.

| use      | the fork ...                                                              |
|----------|---------------------------------------------------------------------------|
| extend   | puts its own in the object's place: an overriding method, a replaced name |
| subclass | derives from the class; each method of that class counts                  |
| call     | imports, calls or reads it                                                |
| patch    | assigns to it                                                             |
"""

import ast
import builtins
from dataclasses import dataclass, replace

from tools.fork.drift_fingerprint import Fingerprint, fingerprint
from tools.fork.drift_source import (
    PACKAGE,
    Module,
    Ref,
    Sources,
    bindings_of,
    own_members,
)
from tools.fork.drift_types import EXTERNAL, Types
from tools.fork.errors import ForkError
from tools.fork.overlay import imported_module

#: Upstream's module and the object's dotted name inside it.
Key = tuple[str, str]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Functions that return an object of their argument's class.
_SAME_CLASS = ("copy.copy", "copy.deepcopy", "dataclasses.replace", "replace")
#: Functions that name an attribute by text.
_BY_TEXT = ("getattr", "setattr", "hasattr", "delattr")
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Use:
    """One upstream object and how the fork uses it."""

    kinds: tuple[str, ...]
    fingerprint: Fingerprint


def find_uses(sources: Sources) -> dict[Key, Use]:
    """Every upstream object that the fork uses.

    Args:
        sources: The composed fork.

    Raises:
        ForkError: The fork names something that upstream does not have, or reaches
            for a private name of an object whose class cannot be told.
    """
    findings = _Findings()
    for name in sorted(sources.fork):
        module = sources.module(name)
        assert module
        _Visitor(sources, module, findings).run()
    for mixin, later_bases in findings.mixins:
        family = _family(mixin, sources)
        sources.mixed_before = dict.fromkeys(family, later_bases)
        for member in family:
            module = sources.module(member.module)
            assert module
            for node in sources.definition(member):
                _Visitor(sources, module, findings).visit(node)
    sources.mixed_before = {}
    for place, error in findings.unknown.items():
        if place not in findings.known:
            raise error
    return {
        key: Use(tuple(sorted(kinds)), fingerprint(sources.definition(ref)))
        for key, (ref, kinds) in sorted(findings.used.items())
    }


def _family(mixin: Ref, sources: Sources) -> list[Ref]:
    """A class of the fork, and those of the fork that it derives from."""
    ours = [base for base in sources.bases(mixin) if base.module in sources.fork]
    inherited = [member for base in ours for member in _family(base, sources)]
    return list(dict.fromkeys([mixin, *inherited]))


class _Findings:
    """What the walks over the fork's modules have in common."""

    def __init__(self) -> None:
        self.used: dict[Key, tuple[Ref, set[str]]] = {}
        #: Classes of the fork that stand before others among a class's bases. Their
        #: `self` and `super()` mean something else for each such class.
        self.mixins: list[tuple[Ref, list[Ref]]] = []
        #: Private names whose owner could not be told, by place; and could after all.
        self.unknown: dict[tuple[str, int, str], ForkError] = {}
        self.known: set[tuple[str, int, str]] = set()


class _Visitor(ast.NodeVisitor):
    """Walks one of the fork's modules and records what it uses."""

    def __init__(self, sources: Sources, module: Module, findings: _Findings) -> None:
        self._sources = sources
        self._types = Types(sources)
        self._module = module
        self._findings = findings
        self._scopes: list[dict[str, Ref | None]] = []  # of functions, outermost first
        self._classes: list[tuple[Ref | None, list[Ref]]] = []  # class, its bases
        self._own_names = set(module.bindings) | {
            member
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
            for member in own_members(node)
        }

    def run(self) -> None:
        """Walks the module."""
        sibling = self._sources.sibling(self._module.name)
        for name, nodes in self._module.bindings.items() if sibling else []:
            assert sibling
            replaced = self._sources.lookup(sibling, name)
            if replaced and any(isinstance(n, _DEFINITIONS) for n in nodes):
                self._record(replaced, "extend")
        self.visit(self._module.tree)

    # What a statement binds.

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            inside = alias.name.partition(".")[0] == PACKAGE
            if inside and not self._sources.is_module(alias.name):
                raise self._error(node, f"upstream has no module {alias.name}")
            name = alias.asname or alias.name.partition(".")[0]
            target = Ref(alias.name if alias.asname else PACKAGE)
            self._bind(name, target if inside else EXTERNAL)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = imported_module(self._module.package, node)
        inside = source.partition(".")[0] == PACKAGE
        for alias in node.names:
            target: Ref | None = EXTERNAL
            name = alias.asname or alias.name
            if inside and alias.name != "*":
                target = self._sources.imported(self._module, node, name)
                if not target and not self._types.is_foreign(source, alias.name):
                    raise self._error(node, f"{source} has no {alias.name}")
                self._record(target, "call")
            self._bind(name, target or EXTERNAL)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for expr in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(expr)
        own: Ref | None = Ref(self._module.name, node.name)
        if self._classes and (outer := self._classes[-1][0]):
            own = outer.member(node.name)
        if not own or self._sources.definition(own) != [node]:
            own = None  # inside a function: its attributes cannot be looked up
        bases = [base for expr in node.bases if (base := self._infer(expr))]
        bases = [self._sources.unalias(base) for base in bases if base != EXTERNAL]
        for place, base in enumerate(bases):
            self._record(base, "subclass")
            if base.module in self._sources.fork and bases[place + 1 :]:
                self._findings.mixins.append((base, bases[place + 1 :]))
            for definition in self._sources.definition(base):
                if isinstance(definition, ast.ClassDef):
                    for name, nodes in bindings_of(definition.body).items():
                        if isinstance(nodes[0], _FUNCTIONS):
                            self._record(base.member(name), "subclass")
        if own:
            bases += self._sources.mixed_before.get(own, [])
        for name in bindings_of(node.body):
            for base in bases:
                if overridden := self._sources.member(base, name):
                    self._record(overridden, "extend")
                    break
        self._classes.append((own, bases))
        for statement in node.body:
            self.visit(statement)
        self._classes.pop()

    def visit_FunctionDef(self, node: _Function) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [extra for extra in (arguments.vararg, arguments.kwarg) if extra]
        annotations = [arg.annotation for arg in every if arg.annotation]
        defaults = [*arguments.defaults, *filter(None, arguments.kw_defaults)]
        returns = [node.returns] if node.returns else []
        for expr in (*node.decorator_list, *annotations, *defaults, *returns):
            self.visit(expr)

        scope = {arg.arg: self._annotated(arg.annotation) for arg in every}
        decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
        is_method = bool(self._classes) and node in self._class_body(node)
        if is_method and every and "staticmethod" not in decorators:
            own, bases = self._classes[-1]
            receiver = own or (bases[0] if bases else None)
            if receiver:
                is_class = "classmethod" in decorators or node.name == "__new__"
                receiver = replace(receiver, instance=not is_class)
            scope[every[0].arg] = receiver
        self._scopes.append(scope)
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        names = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
        self._scopes.append(dict.fromkeys(names))
        self.generic_visit(node)
        self._scopes.pop()

    def visit_ListComp(self, node: ast.AST) -> None:
        self._scopes.append({})
        for _, value in reversed(list(ast.iter_fields(node))):
            # The generators come last and bind the names that the rest reads.
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)
        self._scopes.pop()

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for part, value in pairs:
                if isinstance(part, ast.Name):
                    self._bind(part.id, self._infer(value))
                else:
                    self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        if node.value:
            self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self._bind(node.target.id, self._annotated(node.annotation))
        else:
            self.visit(node.target)

    # What an expression uses.

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._record(self._infer(node), "call")
        else:
            self._bind(node.id, None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        self._reach(node, node.value, node.attr, isinstance(node.ctx, ast.Load))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            self._record(self._infer(node.value), "patch")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        target = self._infer(node.func)
        if isinstance(node.func, ast.Name) and node.func.id in _BY_TEXT:
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                name, reads = str(node.args[1].value), node.func.id != "setattr"
                self._reach(node, node.args[0], name, reads)
        elif target and target != EXTERNAL:
            for special in self._types.called_methods(target):
                self._record(special, "call")

    def _reach(self, node: ast.AST, owner: ast.expr, name: str, reads: bool) -> None:
        """Records `owner.name`."""
        held = self._infer(owner)
        if not reads and held and held.module == self._module.name and held.name:
            held = replace(held, bases_only=True)  # `self.x = ...`: upstream's x, too
        target = self._types.attribute(held, name)
        self._record(target, "call" if reads else "patch")
        if not name.startswith("_") or name.startswith("__"):
            return
        place = (self._module.path, getattr(node, "lineno", 0), name)
        if target or name in self._own_names:
            self._findings.known.add(place)
        else:
            self._findings.unknown[place] = self._error(
                node,
                f"cannot tell whose {name} is used; annotate the variable before the "
                "dot with its class",
            )

    def _infer(self, node: ast.expr) -> Ref | None:
        """What an expression stands for here; None if that cannot be told."""
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._types.attribute(self._infer(node.value), node.attr)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "super":
                return self._super(node)
            if ast.unparse(node.func) in _SAME_CLASS and node.args:
                return self._infer(node.args[0])
            return self._types.result(self._infer(node.func))
        if isinstance(node, ast.Await | ast.NamedExpr):
            return self._infer(node.value)
        if isinstance(node, ast.Subscript):
            return EXTERNAL if self._infer(node.value) == EXTERNAL else None
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.List | ast.Dict):
            return EXTERNAL
        return None

    def _name(self, name: str) -> Ref | None:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        if found := self._sources.lookup(self._module.name, name):
            return found
        outside = name in self._module.bindings or hasattr(builtins, name)
        return EXTERNAL if outside else None

    def _super(self, node: ast.Call) -> Ref | None:
        if node.args:
            start = self._infer(node.args[0])
        else:
            own, bases = self._classes[-1] if self._classes else (None, [])
            if not own:  # a class inside a function
                return replace(bases[0], instance=True) if bases else None
            start = own
        return replace(start, instance=True, bases_only=True) if start else None

    def _annotated(self, annotation: ast.expr | None) -> Ref | None:
        if annotation is None:
            return None
        return self._types.annotation(self._module.name, annotation, self._name)

    def _bind(self, name: str, target: Ref | None) -> None:
        """Remembers a function's local name; module names are looked up."""
        if self._scopes:
            self._scopes[-1][name] = target

    def _class_body(self, node: ast.AST) -> list[ast.stmt]:
        """The body that holds `node`, if a class does so directly."""
        for parent in ast.walk(self._module.tree):
            if isinstance(parent, ast.ClassDef) and node in parent.body:
                return parent.body
        return []

    def _record(self, ref: Ref | None, kind: str) -> None:
        key = self._sources.upstream_key(ref) if ref and ref.name else None
        if key and ref:
            self._findings.used.setdefault(key, (ref, set()))[1].add(kind)

    def _error(self, node: ast.AST, message: str) -> ForkError:
        line = getattr(node, "lineno", 0)
        return ForkError(f"{self._module.path}:{line}: {message}")
