# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Lists every refusal of the code in docs/troubleshooting.md.

    .venv/bin/python -m tools.troubleshooting --write

The messages are read from the source: from each error that a `raise` or a call of the
project's own error classes makes, and from what is added to a list of `problems`. A
value in a message is shown as an ellipsis, unless the source says what it is. A section
of the page names the files whose messages it lists:

    <!-- refusals of exl3/plans.py exl3/tools/prune/ -->
    <!-- end -->

Without `--write` it says whether the page is in step.
"""

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "troubleshooting.md"
#: What is searched for refusals.
TREES = ("exl3", "vllm", "tools/fork")
VALUE = "…"
#: Errors of Python's that a `raise` may show to a user.
_BUILTIN = {
    "ArgumentTypeError",
    "FileNotFoundError",
    "ImportError",
    "OSError",
    "RuntimeError",
    "SystemExit",
    "ValueError",
}
#: Alternatives of one message: made of one call's values, and by all callers. Above
#: these, values are left values.
_MOST, _MOST_BY_CALLERS = 12, 40
#: A value's text is shown in a message if it says at least this much.
_SENTENCE = re.compile(r"(?:\b[A-Za-z][\w.-]*\b\W+){2}\b[A-Za-z]")
_WORD = re.compile(r"[A-Za-z]{2,}")
_SECTION = re.compile(r"(<!-- refusals of ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Scope:
    """Where an expression stands, and what the parameters there are."""

    module: "Module"
    function: _Function | None
    given: Mapping[str, tuple[ast.expr, "Scope"]] = field(default_factory=dict)
    depth: int = 0


class Module:
    """A source file."""

    def __init__(self, path: Path):
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.imported = {
            name.asname or name.name
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        #: The innermost function around a node.
        self.owner: dict[ast.AST, _Function] = {}
        self.functions: dict[str, _Function] = {}
        for node in ast.walk(self.tree):  # outer ones first
            if isinstance(node, _Function):
                self.functions[node.name] = node
                self.owner.update(dict.fromkeys(_inside(node), node))

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call in the file."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]


class Source:
    """All files, and what their expressions can be as text."""

    def __init__(self, paths: Iterable[Path]):
        self.modules = [Module(path) for path in paths]
        self.constants = dict(self._constants())
        self.errors = {
            node.name
            for module in self.modules
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
        }

    def _constants(self) -> Iterator[tuple[str, str]]:
        """Names that stand for one text or number wherever they are assigned."""
        found: dict[str, set[str]] = {}
        for module in self.modules:
            for node in module.tree.body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
                    node.value, ast.Constant
                ):
                    for target in _targets(node):
                        found.setdefault(target, set()).add(str(node.value.value))
        return ((name, texts.pop()) for name, texts in found.items() if len(texts) == 1)

    def messages(self) -> dict[Path, list[str]]:
        """The messages of each file, in the order of its lines, each once."""
        found: dict[Path, list[str]] = {}
        for module in self.modules:
            texts = [
                text
                for call in sorted(self._errors_of(module), key=lambda c: c.lineno)
                for text in self._messages_of(call, module)
                # One word of an error of Python's is said to the code, not to a user.
                if len(_WORD.findall(text)) > (_name(call.func) in _BUILTIN)
            ]
            if texts:
                found[module.path] = list(dict.fromkeys(texts))
        return found

    def _errors_of(self, module: Module) -> Iterator[ast.Call]:
        """Calls that make an error, or a line of a list of problems."""
        raised = {
            node.exc for node in ast.walk(module.tree) if isinstance(node, ast.Raise)
        }
        for call in module.calls:
            name = _name(call.func)
            if call.args and (
                name in self.errors
                or (name in _BUILTIN and call in raised)
                or ast.unparse(call.func) == "problems.append"
            ):
                yield call

    def _messages_of(self, call: ast.Call, module: Module) -> list[str]:
        function = module.owner.get(call)
        bare = Scope(module, function)
        for scopes in (self._scopes(bare), [bare]):
            texts = [text for s in scopes for text in self.texts(call.args[0], s)]
            if len(set(texts)) <= _MOST_BY_CALLERS:
                break
        return texts

    def _scopes(self, scope: Scope) -> list[Scope]:
        """The scope with the parameters that each caller of its function gives."""
        function = scope.function
        if function is None or scope.depth > 2:
            return [scope]
        found = []
        for module in self.modules:
            if module is not scope.module and function.name not in module.imported:
                continue
            for call in module.calls:
                if _name(call.func) == function.name:
                    caller = Scope(module, module.owner.get(call), {}, scope.depth + 1)
                    for outer in self._scopes(caller):
                        given = _bind(function, call, outer)
                        found.append(
                            Scope(scope.module, function, given, scope.depth + 1)
                        )
        return found or [scope]

    def texts(self, node: ast.expr, scope: Scope) -> list[str]:
        """What an expression can be as text, with ellipses for values."""
        if scope.depth > 8:
            return [VALUE]
        match node:
            case ast.Constant(value=str() | int() as value):
                return [str(value)]
            case ast.JoinedStr(values=parts):
                return self._joined(parts, scope)
            case ast.FormattedValue(value=value):
                return _telling(self.texts(value, scope))
            case (
                ast.BinOp(left=ast.Constant(value=int()))
                | ast.BinOp(right=ast.Constant(value=int()))
            ):
                return [VALUE]  # a sum
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined([left, right], scope)
            case ast.IfExp(body=body, orelse=other):
                return [*self.texts(body, scope), *self.texts(other, scope)]
            case ast.Name(id=name):
                return self._named(name, scope)
            case ast.Call(func=ast.Name(id=name)) if name in scope.module.functions:
                return self._returned(scope.module.functions[name], node, scope)
        return [VALUE]

    def _joined(self, parts: Iterable[ast.expr], scope: Scope) -> list[str]:
        choices = [self.texts(part, scope) for part in parts]
        together = 1
        for number, choice in enumerate(choices):
            together *= len(choice)
            if together > _MOST:
                together //= len(choice)
                choices[number] = [VALUE]
        joined = ("".join(each) for each in itertools.product(*choices))
        return [re.sub(rf"{VALUE}(\.?{VALUE})+", VALUE, text) for text in joined]

    def _named(self, name: str, scope: Scope) -> list[str]:
        if name in scope.given:
            node, outer = scope.given[name]
            return self.texts(node, outer)
        values = _assigned(name, scope.function)
        if values:
            deeper = Scope(scope.module, scope.function, scope.given, scope.depth + 1)
            return [text for value in values for text in self.texts(value, deeper)]
        return [self.constants.get(name, VALUE)]

    def _returned(self, function: _Function, call: ast.Call, scope: Scope) -> list[str]:
        inner = Scope(
            scope.module, function, _bind(function, call, scope), scope.depth + 1
        )
        found = [
            text
            for node in _inside(function)
            if isinstance(node, ast.Return) and node.value is not None
            if not (isinstance(node.value, ast.Constant) and node.value.value is None)
            for text in self.texts(node.value, inner)
        ]
        return found or [VALUE]


def _inside(function: _Function) -> Iterator[ast.AST]:
    return (node for node in ast.walk(function) if node is not function)


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _assigned(name: str, function: _Function | None) -> list[ast.expr]:
    """What a function assigns to a name; nothing if a loop does, too."""
    plain: list[ast.expr] = []
    added: list[ast.expr] = []
    stores = 0
    for node in _inside(function) if function else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            if node.value is not None:
                plain.append(node.value)
        elif isinstance(node, ast.AugAssign) and _name(node.target) == name:
            added.append(node.value)
        elif isinstance(node, ast.Name) and node.id == name:
            stores += isinstance(node.ctx, ast.Store)
    if stores != len(plain) + len(added):
        return []
    return plain + [
        ast.BinOp(value, ast.Add(), more) for value in plain for more in added
    ]


def _bind(
    function: _Function, call: ast.Call, scope: Scope
) -> dict[str, tuple[ast.expr, Scope]]:
    """The arguments of a call by the parameters' names."""
    names = [argument.arg for argument in function.args.args]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    given = dict(zip(names, call.args))
    given |= {word.arg: word.value for word in call.keywords if word.arg is not None}
    return {name: (value, scope) for name, value in given.items()}


def _telling(texts: list[str]) -> list[str]:
    """Texts that say something; several single words are a value."""
    if len(set(texts)) == 1:
        return texts[:1]
    return list(
        dict.fromkeys(text if _SENTENCE.search(text) else VALUE for text in texts)
    )


def collect(root: Path = REPO, trees: Iterable[str] = TREES) -> dict[str, list[str]]:
    """The messages of the files below some folders, by path."""
    paths = [path for tree in trees for path in sorted((root / tree).rglob("*.py"))]
    found = Source(paths).messages()
    return {path.relative_to(root).as_posix(): texts for path, texts in found.items()}


def sections(page: str) -> list[list[str]]:
    """The files and folders that each section of a page lists."""
    return [match[2].split() for match in _SECTION.finditer(page)]


def fill_in(page: str, messages: Mapping[str, list[str]]) -> str:
    """A page with the messages in its sections."""

    def section(match: re.Match[str]) -> str:
        listed = [
            _item(text)
            for name in match[2].split()
            for path, texts in messages.items()
            if covers(name, path)
            for text in texts
        ]
        return f"{match[1]}\n{''.join(dict.fromkeys(listed))}\n{match[3]}"

    return _SECTION.sub(section, page)


def covers(name: str, path: str) -> bool:
    """Whether a file or folder that a section names has a file."""
    return path == name or (name.endswith("/") and path.startswith(name))


def _item(text: str) -> str:
    line = " ".join(text.split())
    return f"- `` {line} ``\n" if "`" in line else f"- `{line}`\n"


def main() -> int:
    """Writes the page, or says whether it is in step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    filled = fill_in(page, collect())
    if options.write:
        PAGE.write_text(filled, encoding="utf-8")
    elif filled != page:
        print(f"{PAGE}: not in step; run it with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
