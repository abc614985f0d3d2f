"""Source without what does not change its run time: comments, docstrings, layout, annotations, names of variables.

Variables are numbered in the order in which each function binds them, so that a renamed variable leaves the normalised
source as it was. Names of functions, classes, attributes and modules stay: they say what the code does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = _Function | ast.Lambda


def normalised(source: str | ast.AST) -> str:
    """The normalised text of a source or of a node of it. Raises SyntaxError, ValueError, RecursionError or MemoryError
    for a source that does not parse."""
    tree = ast.parse(source if isinstance(source, str) else ast.unparse(source))
    return ast.unparse(ast.fix_missing_locations(_Renamer(tree).visit(tree)))


class _Renamer(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        self._scopes = [_numbered(_bound_in(tree), "g")]
        self._parameters = {
            node.name: _numbered(_names_of(node), "a") for node in ast.walk(tree) if isinstance(node, _Function)
        }

    def visit_Module(self, node: ast.Module) -> ast.AST:
        node.body = _without_docstring(node.body)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = _without_docstring(node.body)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._scopes.append(_numbered(_names_of(node), "a"))
        self.generic_visit(node)
        self._scopes.pop()
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._name(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg, node.annotation, node.type_comment = self._name(node.arg), None, None
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = self._name(node.name) if node.name else None
        return self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [self._scopes[0].get(name, name) for name in node.names]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if isinstance(node.target, ast.Name) and node.target.id not in self._scopes[-1]:
            return self.generic_visit(node)  # a field of a class: its annotation makes it one
        if node.value is None:
            return ast.Pass()
        return self.visit(ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node))  # type: ignore[no-any-return]  # NodeVisitor.visit is untyped

    def visit_Call(self, node: ast.Call) -> ast.AST:
        own = self._parameters.get(node.func.id) if isinstance(node.func, ast.Name) else None
        for keyword in node.keywords:
            if own is not None and keyword.arg is not None:
                keyword.arg = own.get(keyword.arg, keyword.arg)
        return self.generic_visit(node)

    def _function(self, node: _Function) -> ast.AST:
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        defaults = node.args
        defaults.defaults = [self.visit(each) for each in defaults.defaults]
        defaults.kw_defaults = [self.visit(each) if each is not None else None for each in defaults.kw_defaults]
        scope = self._parameters.get(node.name) or _numbered(_names_of(node), "a")
        bound = [name for name in _bound_in(node) if name not in scope]
        self._scopes.append({**_numbered(_names_of(node), "a"), **_numbered(bound, "v")})
        for arg in _args_of(node):
            self.visit_arg(arg)
        node.returns, node.type_comment = None, None
        node.body = [done for each in _without_docstring(node.body) if (done := self.visit(each)) is not None]
        self._scopes.pop()
        return node

    def _name(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return name


def _numbered(names: list[str], letter: str) -> dict[str, str]:
    return {name: f"{letter}{number}" for number, name in enumerate(dict.fromkeys(names), start=1)}


def _args_of(node: _Scope) -> list[ast.arg]:
    args = node.args
    every = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return [arg for arg in every if arg is not None]


def _names_of(node: _Scope) -> list[str]:
    return [arg.arg for arg in _args_of(node)]


def _bound_in(scope: ast.Module | _Function) -> list[str]:
    """The variables that a scope binds, by their first binding. Functions, classes and imports are none."""
    bound, elsewhere = list[str](), set[str]()
    for node in _inside(scope.body):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.append(node.name)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            elsewhere.update(node.names)
    return [name for name in bound if name not in elsewhere]


def _inside(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of a scope in the order of the text, without those of scopes inside it."""
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:] or [ast.Pass()]
    return body
