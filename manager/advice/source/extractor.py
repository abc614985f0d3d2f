"""Read facts of a function, a loader or a script from its source code (SchedMate §3.1). Each fact has a
certainty. `extract_facts` never raises, executes no code, and reads only files in the given folders.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from stoker.manager.advice.source.facts import WorkloadFacts
from stoker.manager.advice.source.reading import (
    LONGEST_FILE_BYTES,
    Function,
    KnownValue,
    NotReadError,
    SourceModule,
    UserFolders,
    parse_source,
)
from stoker.manager.advice.source.scan import Scanner

# ---- normalised source


def normalise_source(node: ast.AST) -> str:
    """Return source code without comments, docstrings and annotations. Variables get short names (for example `v1`);
    class fields keep their names.
    """
    tree = ast.parse(ast.unparse(node))
    nodes = list(ast.walk(tree))
    parameters = {
        node.name: {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        for node in nodes
        if isinstance(node, Function)
    }
    bodies = [each for node in nodes if isinstance(node, ast.ClassDef) for each in node.body]
    targets = [each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None) for each in bodies]
    fields = {target.id for target in targets if isinstance(target, ast.Name)}
    bound = dict.fromkeys(name for node in nodes if (name := _bound_name(node)) and name not in fields)
    names = {name: f"v{number}" for number, name in enumerate(bound, start=1)}
    for node in nodes:
        match node:
            case ast.Name(id=name):
                node.id = names.get(name, name)
            case ast.arg(arg=name):
                node.arg, node.annotation = names.get(name, name), None
            case ast.ExceptHandler(name=str() as name):
                node.name = names.get(name, name)
            case ast.Global(names=used):
                node.names = [names.get(name, name) for name in used]
            case ast.Call(func=ast.Name(id=function), keywords=keywords):
                for keyword in keywords:
                    if keyword.arg in parameters.get(function, ()):
                        keyword.arg = names.get(keyword.arg or "", keyword.arg)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.returns = None
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                setattr(node, block, [_remove_annotation(each, names) for each in statements])
    return ast.unparse(ast.fix_missing_locations(tree))


def _bound_name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str() as name):
            return name
    return ""


def _remove_annotation(node: ast.stmt, names: Mapping[str, str]) -> ast.stmt:
    if not isinstance(node, ast.AnnAssign) or (isinstance(node.target, ast.Name) and node.target.id not in names):
        return node  # keep the annotation, because it declares a field of the class
    return ast.Assign(targets=[node.target], value=node.value) if node.value is not None else ast.Pass()


# ---- extraction


LONGEST_TEXT = 40_000


class SourceText(msgspec.Struct, frozen=True):
    """Source code. `function`: name of the entry function (`Class.method`), or empty for a script. `file`: path from
    which relative imports and paths are resolved.
    """

    text: str
    function: str = ""
    file: str = ""


def extract_facts(
    source: SourceText, *, arguments: Mapping[str, Any] | None = None, folders: Iterable[str | PathLike[str]] = ()
) -> WorkloadFacts:
    """Return the facts of a source. `arguments`: values for the entry function, by parameter name. `folders`: the
    user's folders; if empty, no file is read.
    """
    reader = UserFolders(folders)
    scanner = Scanner(reader)
    text, given = "", list[str]()
    try:
        entry = _scan_entry(source, arguments or {}, reader, scanner, given)
        inside = set(ast.walk(entry))
        others = [node for node in scanner.results_by_node if node not in inside]
        text = "\n".join(normalise_source(node) for node in [entry, *others])
    except NotReadError as error:
        scanner.add_note(str(error))
    except Exception as error:  # an error in any source code must not end the advisor
        scanner.add_note(f"only a part of the source was read: {type(error).__name__}: {str(error)[:200]}")
    configs = [read for path, read in reader.texts.items() if path.suffix != ".py"]
    parts = [text, *given, *scanner.constants.values(), *configs]
    return WorkloadFacts(
        **scanner.recogniser.found,
        further=scanner.recogniser.further,
        notes=tuple(scanner.notes),
        text=text[:LONGEST_TEXT],
        same=blake2b("\0".join(parts).encode(errors="replace"), digest_size=16).hexdigest() if text else "",
    )


def _scan_entry(
    source: SourceText, arguments: Mapping[str, Any], reader: UserFolders, scanner: Scanner, given: list[str]
) -> ast.AST:
    file = Path(source.file) if source.file else None
    shown = reader.display_name(file) if file is not None else "<source>"
    if len(source.text) > LONGEST_FILE_BYTES:
        raise NotReadError(f"{shown}: not read: it has more than {LONGEST_FILE_BYTES:,} characters")
    tree = parse_source(textwrap.dedent(source.text), shown)
    module = SourceModule(file, shown, tree)
    if not source.function:
        scanner.scan_script(module, tree)
        return tree
    node = _find_definition(tree, source.function)
    if node is None:
        raise NotReadError(f"{shown}: it has no function {source.function}")
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    given += [repr(arguments.get(key)) for key in names]
    scanner.scan_function(module, node, {key: _make_known_argument(value) for key, value in arguments.items()})
    return node


def _find_definition(tree: ast.Module, dotted: str) -> Function | None:
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


def _make_known_argument(value: Any) -> KnownValue:
    if isinstance(value, Mapping):
        value = {str(key): _make_known_argument(each) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        value = [_make_known_argument(each) for each in value[:1000]]
    elif value is not None and not isinstance(value, str | int | float | bool):
        value = str(value)[:300]
    return KnownValue(value, 1.0)


# ---- the loader of a function


def find_loader(text: str, function: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the constant arguments of a function's loader, or None if the source does not show the
    loader.
    """
    try:
        tree = parse_source(text, "")
    except NotReadError:
        return None
    functions = {node.name: node for node in tree.body if isinstance(node, Function)}
    assigned = [(target, node.value) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    values = {target.id: value for target, value in assigned if isinstance(target, ast.Name)}
    decorators = functions[function].decorator_list if function in functions else []
    keywords = [keyword for call in decorators if isinstance(call, ast.Call) for keyword in call.keywords]
    for context in (keyword.value for keyword in keywords if keyword.arg == "context"):
        made = values.get(context.id) if isinstance(context, ast.Name) else context
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in functions:
            spec = functions[made.func.id].args
            given = dict(zip([arg.arg for arg in (*spec.posonlyargs, *spec.args)], made.args, strict=False))
            given |= {keyword.arg: keyword.value for keyword in made.keywords if keyword.arg}
            return made.func.id, {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
    return None
