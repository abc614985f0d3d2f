"""Read source and config files in the user's folders, within limits. No other file is read, not even through a symbolic
link."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import stat
import tomllib
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.manager.advice.source.values import Known
from stoker.units import show_bytes

Function = ast.FunctionDef | ast.AsyncFunctionDef
ADD_ARGUMENT = "add_argument"
INSTALLED = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})


class ReadingLimits(msgspec.Struct, frozen=True):
    files: int = 40
    file_bytes: int = 1_000_000
    total_bytes: int = 4_000_000
    depth: int = 8
    nodes: int = 100_000


class NotReadError(Exception):
    """A file could not be read. The text of the error contains the reason."""


class OutOfBoundsError(Exception):
    """The source code has more statements and expressions than the limit."""


class OwnFolders:
    """Reads files in the user's folders. `texts`: the read texts, by real path."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]], limits: ReadingLimits) -> None:
        self.roots = tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
        self.limits = limits
        self.texts: dict[Path, str] = {}
        self._bytes = 0

    def read(self, path: Path) -> str:
        """Return the text of a file. Raises NotReadError if the file cannot be read."""
        try:
            real = Path(os.path.realpath(path))
            above = [root for root in self.roots if real.is_relative_to(root)]
            if all(INSTALLED.intersection(real.relative_to(root).parts) for root in above):
                raise ValueError("it is outside the given folders")
            if real not in self.texts:
                if len(self.texts) >= self.limits.files:
                    raise ValueError(f"{self.limits.files} files were read already")
                self.texts[real] = self._read(real)
            return self.texts[real]
        except UnicodeDecodeError:
            why = "it is not UTF-8 text"
        except (OSError, ValueError) as error:  # a null byte in the path raises ValueError
            why = getattr(error, "strerror", None) or str(error)
        raise NotReadError(f"{self.name_of(path)}: not read: {why}")

    def _read(self, real: Path) -> str:
        # With O_NONBLOCK, `os.open` does not wait for a writer if the file is a named pipe.
        with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            if status.st_size > self.limits.file_bytes:
                raise ValueError(f"it has {show_bytes(status.st_size)}, more than {show_bytes(self.limits.file_bytes)}")
            if self._bytes + status.st_size > self.limits.total_bytes:
                raise ValueError(f"{show_bytes(self._bytes)} of source were read already")
            data = opened.read(self.limits.file_bytes)
        self._bytes += len(data)
        return data.decode("utf-8-sig")

    def name_of(self, path: Path) -> str:
        place = Path(os.path.abspath(path))
        return next((str(place.relative_to(root)) for root in self.roots if place.is_relative_to(root)), str(path))

    def listing(self) -> Iterator[str]:
        for root in self.roots:
            for folder, folders, files in os.walk(root):
                folders[:] = sorted(name for name in folders if name not in INSTALLED and not name.startswith("."))
                yield from (self.name_of(Path(folder, name)) for name in sorted(files) if not name.startswith("."))


# ---- modules


def parsed(text: str, shown: str) -> ast.Module:
    """Return the syntax tree of source code. Raises NotReadError if the source code cannot be parsed."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise NotReadError(f"{shown}: not read: line {error.lineno or 0} does not parse: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotReadError(f"{shown}: not read: it does not parse: {error}") from None


def module_file(parts: Sequence[str], places: Iterable[Path]) -> Path | None:
    """Return the file of a module or package below one of the folders `places`."""
    bases = [place.joinpath(*parts) for place in places]
    files = [file for base in bases for file in (base.with_name(f"{base.name}.py"), base / "__init__.py")]
    return next(filter(os.path.lexists, files), None)


class SourceModule:
    """A module of the user. `waiting`: the statements that bind each name. `stars`: modules of `from M import *`."""

    def __init__(self, file: Path | None, shown: str, tree: ast.Module) -> None:
        self.file = file
        self.shown = shown
        self.names = {"__name__": Known(file.stem if file is not None else "source")}
        if file is not None:
            self.names["__file__"] = Known(str(file))
        self.stars: list[SourceModule] = []
        self.waiting: dict[str, list[ast.stmt]] = {}
        for statement in tree.body:
            for name in dict.fromkeys(_names_bound(statement)):
                self.waiting.setdefault(name, []).append(statement)


def _names_bound(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name.partition(".")[0] for alias in aliases]
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=attr) as function)):
            return [ADD_ARGUMENT] if attr == ADD_ARGUMENT else _root(function)
        case ast.Expr(value=ast.Call()):
            return []
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target, *_]):
            return _root(target)
    names = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    inside = (child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt))
    return names + [name for child in inside for name in _names_bound(child)]


def _root(node: ast.expr) -> list[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return [node.id] if isinstance(node, ast.Name) else []


@dataclasses.dataclass(eq=False, slots=True)
class Scope:
    """The visible names. `sure`: factor for the certainty of facts."""

    names: ChainMap[str, Known]
    module: SourceModule
    sure: float = 1.0
    depth: int = 0
    returned: Known | None = None

    def where(self, node: ast.AST) -> str:
        return f"{self.module.shown}:{getattr(node, 'lineno', 0)}"


@dataclasses.dataclass(frozen=True, slots=True)
class OwnCode:
    """A function or class of the user, in the scope of its definition. `bound`: the object of a method."""

    node: Function | ast.ClassDef
    around: Scope
    bound: Known | None = None


# ---- config files


CONFIG_READERS = {
    "json.load": "json", "json.loads": "json", "tomllib.load": "toml", "tomllib.loads": "toml", "tomli.load": "toml",
    "tomli.loads": "toml", "toml.load": "toml", "yaml.safe_load": "yaml", "yaml.load": "yaml",
    "yaml.full_load": "yaml", "omegaconf.OmegaConf.load": "yaml",
}  # fmt: skip

MOST_VALUES, DEEPEST = 5_000, 20
"""Maximum number of values in a config file, and maximum nesting depth. With YAML aliases, a short file can represent
billions of values."""
_KEY_REACH_LINES = 2_000


def read_config(name: str, form: str, folders: OwnFolders, *, beside: Path | None) -> Known:
    """Return the values of a config file, each at the first line with its key below its table. Raises NotReadError."""
    places = [*([beside.parent] if beside is not None else []), *folders.roots]
    path = next((place / name for place in places if os.path.isfile(place / name)), None)
    if path is None:
        raise NotReadError(f"{name}: not read: the given folders have no such file")
    text, shown = folders.read(path), folders.name_of(path)
    lines, left = text.splitlines(), MOST_VALUES

    def known(data: Any, depth: int, line: int) -> Known:
        nonlocal left
        left -= 1
        if left < 0 or depth > DEEPEST:
            raise ValueError(f"it has more than {MOST_VALUES} values or is deeper than {DEEPEST}")
        value: Any = data
        if isinstance(data, list):
            value = [known(each, depth + 1, line) for each in data]
        elif isinstance(data, dict):
            below = range(line, min(len(lines), line + _KEY_REACH_LINES))
            found = {str(key): next((at for at in below if str(key) in lines[at]), line) for key in data}
            value = {str(key): known(each, depth + 1, found[str(key)]) for key, each in data.items()}
        elif data is not None and not isinstance(data, str | int | float | bool):
            value = str(data)
        return Known(value, f"{shown}:{line + 1}")

    try:
        loads = {"json": json.loads, "toml": tomllib.loads}.get(form) or importlib.import_module("yaml").safe_load
        return known(loads(text), 0, 0)
    except Exception as error:  # PyYAML may be missing, and the file may be damaged in any way
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise NotReadError(f"{shown}: not used: {why}") from None
