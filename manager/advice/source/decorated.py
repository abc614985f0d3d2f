"""Which loader makes the context of a function, as its decorator in the source says: `@app(context=llm("small"))`."""

from __future__ import annotations

import ast
from typing import Any

import msgspec


class LoaderCall(msgspec.Struct, frozen=True):
    """A loader by its name in the source, and those of its arguments that stand there as plain values."""

    loader: str
    arguments: dict[str, Any]


def loader_of(text: str, function: str) -> LoaderCall | None:
    """The loader of a function's context; None where the source does not tell. Never raises."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    node = functions.get(function)
    for decorator in node.decorator_list if node is not None else ():
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            made: ast.expr | None = keyword.value if keyword.arg == "context" else None
            if isinstance(made, ast.Name):
                made = values.get(made.id)
            if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in functions:
                return LoaderCall(made.func.id, _arguments(made, functions[made.func.id]))
    return None


def _arguments(call: ast.Call, loader: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any]:
    names = [arg.arg for arg in (*loader.args.posonlyargs, *loader.args.args)]
    given = dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
