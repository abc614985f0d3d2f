"""Files and modules of the user's folders, read within bounds. No file outside them is read, also not by a link."""

from __future__ import annotations

import ast
import dataclasses
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.units import show_bytes

INSTALLED = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})
"""Folders of these names hold code of others, wherever they lie."""


class ReadingLimits(msgspec.Struct, frozen=True):
    """How much of the user's folders one extraction reads."""

    files: int = 40
    file_bytes: int = 1_000_000
    total_bytes: int = 4_000_000
    depth: int = 8
    """Calls inside calls that are followed."""
    nodes: int = 100_000
    """Statements and expressions that are visited."""


ADD_ARGUMENT = "add_argument"


class NotReadError(Exception):
    """A file was not read. Its text says why; it stays inside this package."""


class OwnFolders:
    """The folders that may be read, and what was read of them."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]], limits: ReadingLimits) -> None:
        self.roots = tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
        self.limits = limits
        self.texts: dict[Path, str] = {}
        """What was read, by real path."""
        self._bytes = 0

    def contains(self, real: Path) -> bool:
        """True for a real path inside the folders, and outside of installed packages."""
        for root in self.roots:
            if real.is_relative_to(root) and not INSTALLED.intersection(real.relative_to(root).parts):
                return True
        return False

    def read(self, path: Path) -> str:
        """The text of a file. Raises NotReadError."""
        name = self.name_of(path)
        try:
            real = Path(os.path.realpath(path))
            if not self.contains(real):
                raise NotReadError(f"{name}: not read: it lies outside of the folders given")
            if real in self.texts:
                return self.texts[real]
            if len(self.texts) >= self.limits.files:
                raise NotReadError(f"{name}: not read: {self.limits.files} files were read already")
            text = self._read(real, name)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            why = getattr(error, "strerror", None) or str(error)
            raise NotReadError(f"{name}: not read: {why}") from None
        self.texts[real] = text
        return text

    def _read(self, real: Path, name: str) -> str:
        # O_NONBLOCK: opening a named pipe that nobody writes to must not wait.
        file = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise NotReadError(f"{name}: not read: it is no plain file")
            size = status.st_size
            if size > self.limits.file_bytes:
                most = show_bytes(self.limits.file_bytes)
                raise NotReadError(f"{name}: not read: it has {show_bytes(size)}, more than {most}")
            if self._bytes + size > self.limits.total_bytes:
                raise NotReadError(f"{name}: not read: {show_bytes(self._bytes)} of source were read already")
            data = opened.read(self.limits.file_bytes)
        self._bytes += len(data)
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise NotReadError(f"{name}: not read: it is no text in UTF-8") from None

    def name_of(self, path: Path) -> str:
        """A path as people read it: relative to the folder that it lies in."""
        place = Path(os.path.abspath(path))
        for root in self.roots:
            if place.is_relative_to(root):
                return str(place.relative_to(root))
        return str(path)

    def find(self, name: str, *, beside: Path | None) -> Path | None:
        """The file that a relative path in the source names: beside the source, else in one of the folders."""
        places = ([beside.parent] if beside is not None else []) + list(self.roots)
        try:
            for place in places:
                if (place / name).is_file():
                    return place / name
        except (OSError, ValueError):
            return None
        return None

    def module(
        self, parts: Sequence[str], *, beside: Path | None, level: int = 0, package: bool = False
    ) -> Path | None:
        """The file of a module of the user's, by the parts of its name; None if the folders have none. `level`: the
        dots of a relative import; of one, and with `package`, a folder is found too."""
        places = ([beside.parent] if beside is not None else []) + ([] if level else list(self.roots))
        for place in places:
            if level:
                place = place if level == 1 else place.parents[min(level - 2, len(place.parents) - 1)]
            found = self.inside(place, *parts, package=package or level > 0)
            if found is not None:
                return found
        return None

    def inside(self, folder: Path, *parts: str, package: bool = True) -> Path | None:
        """The file of a module in a folder; with `package` a folder without `__init__.py` counts too."""
        if not all(part.isidentifier() for part in parts):
            return None
        base = folder.joinpath(*parts)
        for file in ([base.with_name(base.name + ".py")] if parts else []) + [base / "__init__.py"]:
            if os.path.lexists(file):
                return file
        return base if package and base.is_dir() and self.contains(Path(os.path.realpath(base))) else None

    def listing(self, *, most: int) -> Iterator[str]:
        """The files of the folders as people read them, without hidden and installed ones, at most so many."""
        seen = 0
        for root in self.roots:
            for folder, folders, files in os.walk(root):
                folders[:] = sorted(name for name in folders if name not in INSTALLED and not name.startswith("."))
                for name in sorted(files):
                    if name.startswith("."):
                        continue
                    if seen == most:
                        return
                    seen += 1
                    yield self.name_of(Path(folder, name))


@dataclasses.dataclass(eq=False, slots=True)
class SourceModule:
    """A module of the user's, or a package without a file. `waiting`: statements not scanned yet, by the names that
    they bind."""

    file: Path | None
    shown: str
    name: str = "source"
    folder: Path | None = None
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    waiting: dict[str, list[ast.stmt]] = dataclasses.field(default_factory=dict)
    scanned: set[int] = dataclasses.field(default_factory=set)
    stars: list[SourceModule] = dataclasses.field(default_factory=list)


class OwnModules:
    """Loads modules of the user's, each once."""

    def __init__(self, folders: OwnFolders, *, note: Callable[[str], None]) -> None:
        self._folders = folders
        self._note = note
        self._known: dict[Path, SourceModule | None] = {}

    def module(self, parts: Sequence[str], importer: SourceModule, level: int = 0) -> SourceModule | None:
        """A module of the user's, as `importer` names it; None for an installed or unreadable one."""
        path = self._folders.module(parts, beside=importer.file, level=level)
        return self._loaded(path) if path is not None else None

    def submodule(self, package: SourceModule, name: str) -> SourceModule | None:
        """A module in the folder of a package."""
        path = self._folders.inside(package.folder, name) if package.folder is not None else None
        return self._loaded(path) if path is not None else None

    def _loaded(self, path: Path) -> SourceModule | None:
        try:
            real = path.resolve()
            if real in self._known:
                return self._known[real]
            self._known[real] = None
            shown = self._folders.name_of(path)
            if path.is_dir():
                self._known[real] = SourceModule(None, shown, folder=path)
                return self._known[real]
            tree = parsed(self._folders.read(path), shown)
        except NotReadError as error:
            self._note(str(error))
            return None
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            self._note(f"{path.name}: not read: {error}")
            return None
        module = SourceModule(path, shown, path.stem, path.parent if path.name == "__init__.py" else None)
        self._known[real] = module
        defer(module, tree)
        return module


def parsed(text: str, shown: str) -> ast.Module:
    """The tree of a source. Raises NotReadError."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise NotReadError(f"{shown}: not read: line {error.lineno or 0} does not parse: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotReadError(f"{shown}: not read: it does not parse: {error}") from None


def defer(module: SourceModule, tree: ast.Module) -> None:
    """Let each statement of a module wait until a name that it binds is used."""
    for statement in tree.body:
        for name in dict.fromkeys(_names_bound(statement)):
            module.waiting.setdefault(name, []).append(statement)


def _names_bound(statement: ast.stmt) -> list[str]:
    """The names that a statement binds or changes; a call of a method changes its object."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr == ADD_ARGUMENT:
            return [ADD_ARGUMENT]
        return _root(function) if isinstance(function, ast.Attribute) else []
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute | ast.Subscript):
        return _root(statement.targets[0])
    inside = [
        name for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt) for name in _names_bound(child)
    ]
    names = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [*names, *inside]


def _root(node: ast.expr) -> list[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return [node.id] if isinstance(node, ast.Name) else []
