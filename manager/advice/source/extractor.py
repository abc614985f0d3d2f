"""Facts of a function, a loader or a script from its source text (SchedMate §3.1, without a language model).

The paper's agent reads files until it knows enough. Here a scan reads the literals of the functions that the entry
uses; every fact has its place and its certainty, and a missing one its reason. The optional language model (`agent.py`)
reads the rest. `extract_facts` never raises and never executes code; it reads no file outside the folders given.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from stoker.manager.advice.source.facts import ARGUMENT, FIELDS, WorkloadFacts
from stoker.manager.advice.source.literals import Known
from stoker.manager.advice.source.reading import NotReadError, OwnFolders, ReadingLimits, SourceModule, parsed
from stoker.manager.advice.source.recognise import Recogniser
from stoker.manager.advice.source.scan import Function, OutOfBoundsError, Scanner

# ---- normalised source


def normalised(source: str | ast.AST) -> str:
    """The normalised text of a source or of a node of it. Raises SyntaxError, ValueError, RecursionError or MemoryError
    for a source that does not parse."""
    tree = ast.parse(source if isinstance(source, str) else ast.unparse(source))
    return ast.unparse(ast.fix_missing_locations(_Renamer(tree).visit(tree)))


class _Renamer(ast.NodeTransformer):
    """Numbers the variables of a source; fields of classes keep their names."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        self._parameters = {
            node.name: {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
            for node in nodes
            if isinstance(node, Function)
        }
        bodies = [each for node in nodes if isinstance(node, ast.ClassDef) for each in node.body]
        targets = [
            each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None) for each in bodies
        ]
        fields = {target.id for target in targets if isinstance(target, ast.Name)}
        names = dict.fromkeys(name for node in nodes if (name := _bound_name(node)) and name not in fields)
        self._names = {name: f"v{number}" for number, name in enumerate(names, start=1)}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg, node.annotation, node.type_comment = self._names.get(node.arg, node.arg), None, None
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = self._names.get(node.name or "", node.name)
        return self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [self._names.get(name, name) for name in node.names]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        own = self._parameters.get(node.func.id, ()) if isinstance(node.func, ast.Name) else ()
        for keyword in node.keywords:
            if keyword.arg in own:
                keyword.arg = self._names.get(keyword.arg or "", keyword.arg)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if isinstance(node.target, ast.Name) and node.target.id not in self._names:
            return self.generic_visit(node)  # a field of a class: its annotation makes it one
        if node.value is None:
            return ast.Pass()
        return self.visit(ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node))  # type: ignore[no-any-return]  # NodeVisitor.visit is untyped

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            node.body = _without_docstring(node.body)
        if isinstance(node, Function):
            node.returns, node.type_comment = None, None
        return super().generic_visit(node)


def _bound_name(node: ast.AST) -> str:
    """The variable or parameter that a node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else (node.name or "") if isinstance(node, ast.ExceptHandler) else ""


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:] or [ast.Pass()]
    return body


# ---- extraction


LONGEST_TEXT = 40_000
_Definition = ast.FunctionDef | ast.AsyncFunctionDef


class SourceText(msgspec.Struct, frozen=True):
    """The source that facts are taken from. `function`: the name of the entry function, dotted for a method; empty
    for a script. `file` is where the text lies, if it lies anywhere: relative imports and paths start there."""

    text: str
    function: str = ""
    file: str = ""


def extract_facts(
    source: SourceText,
    *,
    arguments: Mapping[str, Any] | None = None,
    folders: Iterable[str | PathLike[str]] = (),
    limits: ReadingLimits | None = None,
) -> WorkloadFacts:
    """What a source says of its work.

    `arguments`: those of the entry function, by the names of its parameters. `folders`: the user's, in which modules
    and config files are looked for; without them no file is read.
    """
    reader = OwnFolders(folders, limits or ReadingLimits())
    scanner = Scanner(reader)
    text, given = "", list[str]()
    try:
        if len(source.text) > reader.limits.file_bytes:
            raise NotReadError(f"{source.file or '<source>'}: not read: it is longer than {reader.limits.file_bytes:,}")
        entry = _scanned(source, dict(arguments or {}), reader, scanner, given)
        text = _normalised(scanner, entry)
    except OutOfBoundsError:
        scanner.note(f"the source has more than {reader.limits.nodes:,} expressions; the first ones were looked at")
    except NotReadError as error:
        scanner.note(str(error))
    except Exception as error:  # a source must not end the advisor, whatever it is
        scanner.note(f"the source was not read to its end: {type(error).__name__}: {str(error)[:200]}")
    configs = [read for path, read in reader.texts.items() if path.suffix != ".py"]
    parts = [text, *given, *scanner.constants.values(), *configs]
    same = blake2b("\0".join(parts).encode(errors="replace"), digest_size=16).hexdigest() if text else ""
    return WorkloadFacts(
        **scanner.recogniser.found,
        further=scanner.recogniser.further,
        absent=_absent(scanner.recogniser, scanner.notes),
        notes=tuple(scanner.notes),
        text=text[:LONGEST_TEXT],
        same=same,
    )


def _scanned(
    source: SourceText, arguments: dict[str, Any], reader: OwnFolders, scanner: Scanner, given: list[str]
) -> ast.AST:
    """Scan the entry; returns its node. The values of its arguments, in the order of its parameters, go to `given`."""
    file = Path(source.file) if source.file else None
    shown = reader.name_of(file) if file is not None else "<source>"
    tree = parsed(textwrap.dedent(source.text), shown)
    module = SourceModule(file, shown, file.stem if file is not None else "source")
    if not source.function:
        scanner.script(module, tree)
        return tree
    node = _definition(tree, source.function)
    if node is None:
        raise NotReadError(f"{shown}: it has no function {source.function}")
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    given += [repr(arguments.get(key)) for key in names]
    scanner.enter(module, tree, node, {key: _given(value) for key, value in arguments.items()})
    return node


def _definition(tree: ast.Module, dotted: str) -> Function | None:
    """The function of this dotted name, else the last one of its last name, else the only one that there is."""
    body: list[ast.stmt] = tree.body
    for part in dotted.split("."):
        found = [node for node in body if isinstance(node, Function | ast.ClassDef) and node.name == part]
        if not found:
            break
        body = found[-1].body
    else:
        return found[-1] if isinstance(found[-1], Function) else None
    every = [node for node in ast.walk(tree) if isinstance(node, Function)]
    named = [node for node in every if node.name == dotted.rpartition(".")[2]]
    return named[-1] if named else every[0] if len(every) == 1 else None


def _given(value: Any) -> Known:
    if isinstance(value, Mapping):
        return Known({str(key): _given(each) for key, each in value.items()}, ARGUMENT, 1.0)
    if isinstance(value, list | tuple):
        return Known([_given(each) for each in value[:1000]], ARGUMENT, 1.0)
    plain = value if value is None or isinstance(value, str | int | float | bool) else str(value)[:300]
    return Known(plain, ARGUMENT, 1.0)


def _normalised(scanner: Scanner, entry: ast.AST) -> str:
    nodes = [entry, *(node for node in scanner.followed.values() if node is not entry)]
    inside = {id(node) for node in ast.walk(entry) if node is not entry}
    return "\n".join(normalised(node) for node in nodes if id(node) not in inside)


def _absent(recogniser: Recogniser, notes: Sequence[str]) -> dict[str, str]:
    others = f"; {notes[0]}" if notes else ""
    return {
        field: recogniser.missed.get(field, f"nothing in the source that was read names it{others}")
        for field in FIELDS
        if field not in recogniser.found
    }


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
    functions = {node.name: node for node in tree.body if isinstance(node, Function)}
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


def _arguments(call: ast.Call, loader: Function) -> dict[str, Any]:
    names = [arg.arg for arg in (*loader.args.posonlyargs, *loader.args.args)]
    given = dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
