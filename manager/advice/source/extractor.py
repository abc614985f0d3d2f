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
from stoker.manager.advice.source.normalise import normalised
from stoker.manager.advice.source.reading import NotReadError, OwnFolders, ReadingLimits
from stoker.manager.advice.source.recognise import Recogniser
from stoker.manager.advice.source.scan import Function, OutOfBoundsError, Scanner, SourceModule, parsed

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
