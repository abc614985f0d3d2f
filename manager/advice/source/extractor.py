"""Facts of a function, a loader or a script from its source text (SchedMate §3.1, without a language model).

The paper's agent reads files until it knows enough; rules are called too brittle there. What makes them less so here:
the source is read as Python reads it (names, calls, imports, arguments and branches are followed, not lines matched),
every fact has its place and its certainty, and what is not found is absent with a reason. `extract_facts` never raises
and never executes code; it reads no file outside the folders that it is given.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from stoker.manager.advice.source.evaluator import OutOfBoundsError
from stoker.manager.advice.source.facts import ARGUMENT, FIELDS, WorkloadFacts
from stoker.manager.advice.source.following import Follower
from stoker.manager.advice.source.modules import parsed
from stoker.manager.advice.source.normalise import normalised
from stoker.manager.advice.source.reading import NotReadError, OwnFolders, ReadingLimits
from stoker.manager.advice.source.recognise import Recogniser
from stoker.manager.advice.source.values import FieldBag, Known, OwnFunction, SourceModule

LONGEST_TEXT = 40_000
_Definition = ast.FunctionDef | ast.AsyncFunctionDef


class SourceText(msgspec.Struct, frozen=True):
    """The source that facts are taken from. `function`: the name of the entry function, dotted for a method; empty
    for a script. `file` is where the text lies, if it lies anywhere: relative imports and paths start there."""

    text: str
    function: str = ""
    file: str = ""


def source_text_of(function: Callable[..., Any]) -> SourceText | None:
    """The source around a function of this process, for an advisor in another one; None if it has none."""
    plain = inspect.unwrap(function)
    plain = getattr(plain, "loader", plain)
    try:
        file = inspect.getsourcefile(plain) or ""
        text = Path(file).read_text(encoding="utf-8") if Path(file).is_file() else inspect.getsource(plain)
    except (OSError, TypeError, UnicodeDecodeError):
        return None
    name = str(getattr(plain, "__qualname__", "") or getattr(plain, "__name__", ""))
    return SourceText(text, name.replace(".<locals>", ""), file if Path(file).is_file() else "")


def extract_facts(
    source: SourceText,
    *,
    arguments: Mapping[str, Any] | None = None,
    command_line: Sequence[str] = (),
    folders: Iterable[str | PathLike[str]] = (),
    limits: ReadingLimits | None = None,
) -> WorkloadFacts:
    """What a source says of its work.

    `arguments`: those of the entry function, by the names of its parameters. `command_line`: of a script, without its
    name. `folders`: the user's own, in which modules and config files are looked for; without them nothing is read.
    """
    recogniser = Recogniser()
    reader = OwnFolders(folders, limits or ReadingLimits())
    follower = Follower(reader, command_line=command_line, recogniser=recogniser)
    text, given = "", [*command_line]
    try:
        if len(source.text) > reader.limits.file_bytes:
            raise NotReadError(f"{source.file or '<source>'}: not read: it is longer than {reader.limits.file_bytes:,}")
        entry = _walked(source, dict(arguments or {}), reader, follower, given)
        text = _normalised(follower, entry)
    except OutOfBoundsError:
        follower.note(f"the source has more than {reader.limits.nodes:,} expressions; the first ones were looked at")
    except NotReadError as error:
        follower.note(str(error))
    except Exception as error:  # a source must not end the advisor, whatever it is
        follower.note(f"the source was not read to its end: {type(error).__name__}: {str(error)[:200]}")
    configs = [read for path, read in reader.texts.items() if path.suffix != ".py"]
    parts = [text, *given, *follower.constants.values(), *configs]
    same = blake2b("\0".join(parts).encode(errors="replace"), digest_size=16).hexdigest() if text else ""
    return WorkloadFacts(
        **recogniser.found,
        further=recogniser.further,
        absent=_absent(recogniser, follower.notes),
        notes=tuple(follower.notes),
        text=text[:LONGEST_TEXT],
        same=same,
    )


def _walked(
    source: SourceText, arguments: dict[str, Any], reader: OwnFolders, follower: Follower, given: list[str]
) -> ast.AST:
    """Walk the entry; returns its node. The values of its arguments, in the order of its parameters, go to `given`."""
    file = Path(source.file) if source.file else None
    shown = reader.name_of(file) if file is not None else "<source>"
    tree = parsed(textwrap.dedent(source.text), shown)
    name = "__main__" if not source.function else (file.stem if file is not None else "source")
    module = SourceModule(file, name, _package_of(file, reader), {})
    follower.finder.know(module)
    if not source.function:
        follower.walk_script(module, tree, shown)
        return tree
    follower.walk_quietly(module, tree, shown)
    node = _definition(tree, source.function)
    if node is None:
        raise NotReadError(f"{shown}: it has no function {source.function}")
    follower.decorators(node, module, shown)
    bound = {**follower.click_values(node), **{key: _given(value) for key, value in arguments.items()}}
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    given += [repr(arguments.get(key)) for key in names]
    follower.follow(OwnFunction(node, module, {}), [], bound, file=shown, entry=True)
    return node


def _definition(tree: ast.Module, dotted: str) -> _Definition | None:
    """The function of this dotted name, else the last one of its last name, else the only one that there is."""
    body: list[ast.stmt] = tree.body
    for part in dotted.split("."):
        found = [node for node in body if isinstance(node, _Definition | ast.ClassDef) and node.name == part]
        if not found:
            break
        body = found[-1].body
    else:
        return found[-1] if isinstance(found[-1], _Definition) else None
    every = [node for node in ast.walk(tree) if isinstance(node, _Definition)]
    named = [node for node in every if node.name == dotted.rpartition(".")[2]]
    return named[-1] if named else every[0] if len(every) == 1 else None


def _package_of(file: Path | None, reader: OwnFolders) -> str:
    """The package that a file lies in, seen from the folder given."""
    for root in reader.roots:
        if file is not None and file.is_relative_to(root):
            return ".".join(file.relative_to(root).parent.parts)
    return ""


def _given(value: Any) -> Known:
    if isinstance(value, Mapping):
        return Known(FieldBag({str(key): _given(each) for key, each in value.items()}), ARGUMENT, 1.0)
    if isinstance(value, list | tuple):
        return Known([_given(each) for each in value[:1000]], ARGUMENT, 1.0)
    plain = value if value is None or isinstance(value, str | int | float | bool) else str(value)[:300]
    return Known(plain, ARGUMENT, 1.0)


def _normalised(follower: Follower, entry: ast.AST) -> str:
    nodes = [entry, *(node for node in follower.followed.values() if node is not entry)]
    inside = {id(node) for node in ast.walk(entry) if node is not entry}
    return "\n".join(normalised(node) for node in nodes if id(node) not in inside)


def _absent(recogniser: Recogniser, notes: Sequence[str]) -> dict[str, str]:
    others = f"; {notes[0]}" if notes else ""
    return {
        field: recogniser.missed.get(field, f"nothing in the source that was read names it{others}")
        for field in FIELDS
        if field not in recogniser.found
    }
