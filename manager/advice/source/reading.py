"""Files and modules of the user's folders, read within bounds. No file outside them is read, not even by a link."""

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

ADD_ARGUMENT = "add_argument"
INSTALLED = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})
"""Names of folders that hold other people's code."""


class ReadingLimits(msgspec.Struct, frozen=True):
    """Bounds of one extraction. `depth`: nested calls to follow; `nodes`: statements and expressions to visit."""

    files: int = 40
    file_bytes: int = 1_000_000
    total_bytes: int = 4_000_000
    depth: int = 8
    nodes: int = 100_000


class NotReadError(Exception):
    """A file was not read; the text says why. It stays inside this package."""


class OwnFolders:
    """Reads files of the user's folders. `texts`: the files read so far, by real path."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]], limits: ReadingLimits) -> None:
        self.roots = tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
        self.limits = limits
        self.texts: dict[Path, str] = {}
        self._bytes = 0

    def contains(self, real: Path) -> bool:
        """True for a real path inside the folders and outside installed packages."""
        return any(
            real.is_relative_to(root) and not INSTALLED.intersection(real.relative_to(root).parts)
            for root in self.roots
        )

    def read(self, path: Path) -> str:
        """Return the text of a file. Raises NotReadError."""
        try:
            real = Path(os.path.realpath(path))
            if not self.contains(real):
                raise ValueError("it lies outside of the folders given")
            if real not in self.texts:
                if len(self.texts) >= self.limits.files:
                    raise ValueError(f"{self.limits.files} files were read already")
                self.texts[real] = self._read(real)
            return self.texts[real]
        except UnicodeDecodeError:
            why = "it is no text in UTF-8"
        except (OSError, ValueError) as error:  # ValueError: also a null byte in the path
            why = getattr(error, "strerror", None) or str(error)
        raise NotReadError(f"{self.name_of(path)}: not read: {why}")

    def _read(self, real: Path) -> str:
        # O_NONBLOCK: opening a named pipe without a writer must not wait.
        with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no plain file")
            if status.st_size > self.limits.file_bytes:
                raise ValueError(f"it has {show_bytes(status.st_size)}, more than {show_bytes(self.limits.file_bytes)}")
            if self._bytes + status.st_size > self.limits.total_bytes:
                raise ValueError(f"{show_bytes(self._bytes)} of source were read already")
            data = opened.read(self.limits.file_bytes)
        self._bytes += len(data)
        return data.decode("utf-8-sig")

    def name_of(self, path: Path) -> str:
        """Return a path relative to the folder that contains it."""
        place = Path(os.path.abspath(path))
        return next((str(place.relative_to(root)) for root in self.roots if place.is_relative_to(root)), str(path))

    def find(self, name: str, *, beside: Path | None) -> Path | None:
        """Return the file that a relative path in the source names: next to the source, else in one of the folders."""
        places = [*([beside.parent] if beside is not None else []), *self.roots]
        try:
            return next((place / name for place in places if (place / name).is_file()), None)
        except (OSError, ValueError):
            return None

    def module(
        self, parts: Sequence[str], *, beside: Path | None, level: int = 0, package: bool = False
    ) -> Path | None:
        """Return the file of a user's module. `level`: the dots of a relative import; with it, or with `package`, a
        folder without `__init__.py` counts too."""
        places = [beside.parent] if beside is not None else []
        if level:
            places = [[place, *place.parents][min(level - 1, len(place.parents))] for place in places]
        else:
            places += self.roots
        found = (self.inside(place, *parts, package=package or level > 0) for place in places)
        return next((path for path in found if path is not None), None)

    def inside(self, folder: Path, *parts: str, package: bool = True) -> Path | None:
        """Return the file of a module in a folder; with `package`, also a folder without `__init__.py`."""
        if not all(part.isidentifier() for part in parts):
            return None
        base = folder.joinpath(*parts)
        for file in ([base.with_name(base.name + ".py")] if parts else []) + [base / "__init__.py"]:
            if os.path.lexists(file):
                return file
        return base if package and base.is_dir() and self.contains(Path(os.path.realpath(base))) else None

    def listing(self) -> Iterator[str]:
        """Yield the files of the folders, without hidden and installed ones."""
        for root in self.roots:
            for folder, folders, files in os.walk(root):
                folders[:] = sorted(name for name in folders if name not in INSTALLED and not name.startswith("."))
                yield from (self.name_of(Path(folder, name)) for name in sorted(files) if not name.startswith("."))


@dataclasses.dataclass(eq=False, slots=True)
class SourceModule:
    """A user's module, or a package without a file. `waiting`: statements not scanned yet, by the names they bind;
    `scanned`: ids of those that are."""

    file: Path | None
    shown: str
    name: str = "source"
    folder: Path | None = None
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    waiting: dict[str, list[ast.stmt]] = dataclasses.field(default_factory=dict)
    scanned: set[int] = dataclasses.field(default_factory=set)
    stars: list[SourceModule] = dataclasses.field(default_factory=list)

    def defer(self, tree: ast.Module) -> None:
        """Let each statement wait until a name that it binds is used."""
        for statement in tree.body:
            for name in dict.fromkeys(_names_bound(statement)):
                self.waiting.setdefault(name, []).append(statement)


class OwnModules:
    """Loads the user's modules, each once."""

    def __init__(self, folders: OwnFolders, *, note: Callable[[str], None]) -> None:
        self._folders = folders
        self._note = note
        self._known: dict[Path, SourceModule | None] = {}

    def module(self, parts: Sequence[str], importer: SourceModule, level: int = 0) -> SourceModule | None:
        """Return a module as `importer` names it; None for an installed or unreadable one."""
        return self._loaded(self._folders.module(parts, beside=importer.file, level=level))

    def submodule(self, package: SourceModule, name: str) -> SourceModule | None:
        """Return a module in the folder of a package."""
        return self._loaded(self._folders.inside(package.folder, name)) if package.folder is not None else None

    def _loaded(self, path: Path | None) -> SourceModule | None:
        if path is None:
            return None
        try:
            real = path.resolve()
            if real in self._known:
                return self._known[real]
            self._known[real] = None
            shown = self._folders.name_of(path)
            if path.is_dir():
                module = SourceModule(None, shown, folder=path)
            else:
                tree = parsed(self._folders.read(path), shown)
                module = SourceModule(path, shown, path.stem, path.parent if path.name == "__init__.py" else None)
                module.defer(tree)
        except NotReadError as error:
            self._note(str(error))
            return None
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            self._note(f"{path.name}: not read: {error}")
            return None
        self._known[real] = module
        return module


def parsed(text: str, shown: str) -> ast.Module:
    """Return the tree of a source. Raises NotReadError."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise NotReadError(f"{shown}: not read: line {error.lineno or 0} does not parse: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotReadError(f"{shown}: not read: it does not parse: {error}") from None


def _names_bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement binds or changes; a method call changes its object."""
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
