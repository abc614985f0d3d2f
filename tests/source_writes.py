"""Find fields that source code writes: assigned, deleted, or changed by a method, also through local names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

CHANGES = {
    "add", "add_measurement", "add_runs", "append", "appendleft", "clear", "demote", "difference_update", "discard",
    "drop", "end", "end_burst", "extend", "insert", "move_to_end", "pop", "popitem", "popleft", "put", "put_back",
    "record_burst", "record_processed_share", "remove", "remove_library", "set_aside", "set_level", "setdefault",
    "take", "take_calls", "tell", "update", "use_advised_paces",
}  # fmt: skip
"""Methods that change their object."""


def written(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from _in_function(function)


def _in_function(function: ast.FunctionDef) -> Iterator[tuple[str, str, int]]:
    local: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    _bind(local, target, value)
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=elements)):
                local[name] += elements
            case ast.For(target=ast.Tuple(elts=[ast.Name(id=name), *_]), iter=ast.Tuple(elts=rows)):
                local[name] += [row.elts[0] for row in rows if isinstance(row, ast.Tuple)]
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                pass
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                targets = [target]
            case ast.Call(func=ast.Attribute(value=changed, attr=method)) if method in CHANGES:
                targets = [ast.Subscript(changed, ast.Constant(0), ast.Store())]
            case _:
                continue
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                yield from _fields(each, local)


def _bind(local: dict[str, list[ast.expr]], target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Name):
        local[target.id].append(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, part in zip(target.elts, value.elts, strict=False):
            _bind(local, each, part)


def _fields(target: ast.expr, local: dict[str, list[ast.expr]]) -> Iterator[tuple[str, str, int]]:
    inside = False
    while isinstance(target, ast.Subscript):
        target, inside = target.value, True
    if isinstance(target, ast.Attribute):
        yield target.attr, ast.unparse(target.value), target.lineno
    elif inside and isinstance(target, ast.Name):
        for value in local.get(target.id, ()):
            while isinstance(value, ast.Subscript):
                value = value.value
            if isinstance(value, ast.Attribute):
                yield value.attr, ast.unparse(value.value), value.lineno
