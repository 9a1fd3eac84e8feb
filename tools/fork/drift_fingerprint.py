# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What is compared of an upstream object: its signature, and a hash of the rest."""

import ast
import hashlib
from dataclasses import dataclass

#: Hexadecimal digits kept of a hash; 64 bits are ample for a few thousand objects.
_DIGITS = 16
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Fields that say nothing, or that only some Python versions have.
_IGNORED = ("ctx", "kind", "type_comment")


@dataclass(frozen=True)
class Fingerprint:
    """What an object looks like, without its text."""

    signature: str  # a function's parameters, a class's bases, a variable's type
    body: str  # SHA-256, shortened, of the normalised syntax tree without those


def fingerprint(nodes: list[ast.AST]) -> Fingerprint:
    """Fingerprint of an object from the statements that define it.

    Comments, docstrings and layout do not count. A class stands for its decorators
    and attributes; each of its methods has a fingerprint of its own.
    """
    body = "\n".join(_body(node) for node in nodes)
    signatures = dict.fromkeys(_signature(node) for node in nodes)
    return Fingerprint(
        " | ".join(filter(None, signatures)),
        hashlib.sha256(body.encode()).hexdigest()[:_DIGITS],
    )


def _signature(node: ast.AST) -> str:
    if isinstance(node, _FUNCTIONS):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"({ast.unparse(node.args)}){returns}"
    if isinstance(node, ast.ClassDef):
        parts = [ast.unparse(base) for base in node.bases]
        parts += [f"{word.arg}={ast.unparse(word.value)}" for word in node.keywords]
        return f"({', '.join(parts)})"
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation)
    return ""


def _body(node: ast.AST) -> str:
    """The normalised tree of a statement, less what the signature says."""
    if isinstance(node, _FUNCTIONS):
        kind = type(node).__name__
        return f"{kind}{_dump(node.decorator_list)}{_dump(node.body)}"
    if isinstance(node, ast.ClassDef):
        own = [stmt for stmt in node.body if not isinstance(stmt, _FUNCTIONS)]
        return f"ClassDef{_dump(node.decorator_list)}{_dump(own)}"
    if isinstance(node, ast.AnnAssign):
        return f"AnnAssign{_dump(node.value)}"
    return _dump(node)


def _dump(node: object) -> str:
    """Like `ast.dump`, but the same from every Python version.

    >>> _dump(ast.parse("x = f(1)  # why").body[0])
    "Assign(targets=[Name(id='x')],value=Call(func=Name(id='f'),args=[Constant(value=1)]))"
    """
    if isinstance(node, list):
        return f"[{','.join(_dump(item) for item in node if not _is_text(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [
        f"{name}={_dump(value)}"
        for name, value in ast.iter_fields(node)
        if name not in _IGNORED and value is not None and value != []
    ]
    return f"{type(node).__name__}({','.join(fields)})"


def _is_text(node: object) -> bool:
    """Whether a statement is a docstring, of whatever it stands beneath."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
