"""Read files and modules in the user's folders, within limits, and the values that these files contain.

No file outside the folders is read, not even through a symbolic link.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import operator
import os
import os.path
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.units import show_bytes

ADD_ARGUMENT = "add_argument"
INSTALLED = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})


class ReadingLimits(msgspec.Struct, frozen=True):
    """Limits of a scan of source code. `depth`: maximum number of nested calls to follow. `nodes`: maximum number of
    statements and expressions to visit."""

    files: int = 40
    file_bytes: int = 1_000_000
    total_bytes: int = 4_000_000
    depth: int = 8
    nodes: int = 100_000


class NotReadError(Exception):
    """A file could not be read. The text of the error contains the reason."""


class OwnFolders:
    """Reads files in the user's folders. `texts`: the texts of the files that have been read, by real path."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]], limits: ReadingLimits) -> None:
        self.roots = tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
        self.limits = limits
        self.texts: dict[Path, str] = {}
        self._bytes = 0

    def contains(self, real: Path) -> bool:
        return any(
            real.is_relative_to(root) and not INSTALLED.intersection(real.relative_to(root).parts)
            for root in self.roots
        )

    def read(self, path: Path) -> str:
        """Return the text of a file. Raises NotReadError if the file cannot be read."""
        try:
            real = Path(os.path.realpath(path))
            if not self.contains(real):
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

    def find(self, name: str, *, beside: Path | None) -> Path | None:
        places = [*([beside.parent] if beside is not None else []), *self.roots]
        try:
            return next((place / name for place in places if (place / name).is_file()), None)
        except (OSError, ValueError):
            return None

    def module(
        self, parts: Sequence[str], *, beside: Path | None, level: int = 0, package: bool = False
    ) -> Path | None:
        """Return the file of a module in the user's folders. `level`: number of dots of a relative import. If `level`
        or `package` is set, a folder without `__init__.py` is also a module."""
        places = [beside.parent] if beside is not None else []
        if level:
            places = [[place, *place.parents][min(level - 1, len(place.parents))] for place in places]
        else:
            places += self.roots
        found = (self.inside(place, *parts, package=package or level > 0) for place in places)
        return next((path for path in found if path is not None), None)

    def inside(self, folder: Path, *parts: str, package: bool = True) -> Path | None:
        if not all(part.isidentifier() for part in parts):
            return None
        base = folder.joinpath(*parts)
        for file in ([base.with_name(base.name + ".py")] if parts else []) + [base / "__init__.py"]:
            if os.path.lexists(file):
                return file
        return base if package and base.is_dir() and self.contains(Path(os.path.realpath(base))) else None

    def listing(self) -> Iterator[str]:
        for root in self.roots:
            for folder, folders, files in os.walk(root):
                folders[:] = sorted(name for name in folders if name not in INSTALLED and not name.startswith("."))
                yield from (self.name_of(Path(folder, name)) for name in sorted(files) if not name.startswith("."))


@dataclasses.dataclass(eq=False, slots=True)
class SourceModule:
    """A module of the user, or a package without `__init__.py`. `waiting`: statements that have not been scanned yet,
    by the names that the statements bind.
    """

    file: Path | None
    shown: str
    name: str = "source"
    folder: Path | None = None
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    waiting: dict[str, list[ast.stmt]] = dataclasses.field(default_factory=dict)
    scanned: set[int] = dataclasses.field(default_factory=set)
    stars: list[SourceModule] = dataclasses.field(default_factory=list)

    def defer_statements(self, tree: ast.Module) -> None:
        for statement in tree.body:
            for name in dict.fromkeys(_names_bound(statement)):
                self.waiting.setdefault(name, []).append(statement)


class OwnModules:
    def __init__(self, folders: OwnFolders, *, note: Callable[[str], None]) -> None:
        self._folders = folders
        self._note = note
        self._known: dict[Path, SourceModule | None] = {}

    def module(self, parts: Sequence[str], importer: SourceModule, level: int = 0) -> SourceModule | None:
        return self._loaded(self._folders.module(parts, beside=importer.file, level=level))

    def submodule(self, package: SourceModule, name: str) -> SourceModule | None:
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
                module.defer_statements(tree)
        except NotReadError as error:
            self._note(str(error))
            return None
        except (OSError, RuntimeError) as error:  # RuntimeError: symbolic links form a loop
            self._note(f"{path.name}: not read: {error}")
            return None
        self._known[real] = module
        return module


def parsed(text: str, shown: str) -> ast.Module:
    """Return the syntax tree of source code. Raises NotReadError if the source code cannot be parsed."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise NotReadError(f"{shown}: not read: line {error.lineno or 0} does not parse: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotReadError(f"{shown}: not read: it does not parse: {error}") from None


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


# ---- literals


LONGEST_TEXT = 10_000
LARGEST_NUMBER = 1e18
MOST_VALUES, DEEPEST = 5_000, 20
"""Maximum number of values in a config file, and maximum nesting depth. With YAML aliases, a short file can represent
billions of values."""

CONFIG_READERS = {
    "json.load": "json", "json.loads": "json", "tomllib.load": "toml", "tomllib.loads": "toml", "tomli.load": "toml",
    "tomli.loads": "toml", "toml.load": "toml", "yaml.safe_load": "yaml", "yaml.load": "yaml",
    "yaml.full_load": "yaml", "omegaconf.OmegaConf.load": "yaml",
}  # fmt: skip

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_COMPARED = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.eq, ast.IsNot: operator.ne}
_COMPUTED: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "max": max, "min": min, "len": len, "range": range, "tqdm.trange": range,
    "tqdm.auto.trange": range, "os.path.join": os.path.join, "pathlib.Path": os.path.join,
    "os.path.abspath": os.path.join, "os.path.dirname": os.path.dirname,
}  # fmt: skip
_CONVERTS = frozenset({"int", "float", "str", "max", "min", "len"})  # keywords change the results of these functions
_WRAPPERS = frozenset({"tqdm.tqdm", "tqdm", "tqdm.auto.tqdm", "enumerate", "reversed", "list"})
_SAME_TEXT = frozenset({"resolve", "absolute", "expanduser", "lower", "strip"})


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A value with its place (`file:line`) and certainty. `value`: a constant, a list of Known, a dict of Known by name
    (options, an instance, a config), a range, or an instance of a class below."""

    value: Any
    where: str
    sure: float = 0.95

    def with_scaled_certainty(self, factor: float) -> Known:
        return Known(self.value, self.where, self.sure * factor)

    @property
    def constant(self) -> bool:
        return self.value is None or isinstance(self.value, str | int | float | bool)


@dataclasses.dataclass(frozen=True, slots=True)
class InstalledName:
    """A name from an installed package, such as `torch.float16`. The name of a call's result ends with `()`."""

    dotted: str

    @property
    def last(self) -> str:
        return self.dotted.rpartition(".")[2]


@dataclasses.dataclass(frozen=True, slots=True)
class NamedFile:
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallSite:
    """A call of a function from an installed package. `dotted`: name of the function, such as `torch.load`, or `?.to`
    for a method of an unknown object. An argument whose value is unknown is None.
    """

    dotted: str
    args: tuple[Known | None, ...]
    kwargs: dict[str, Known | None]
    where: str
    sure: float

    @property
    def last(self) -> str:
        return self.dotted.rpartition(".")[2]

    def argument(self, place: int, *names: str) -> Known | None:
        named = next((name for name in names if name in self.kwargs), None)
        if named is not None:
            return self.kwargs[named]
        return self.args[place] if 0 <= place < len(self.args) else None

    def gives(self, place: int, *names: str) -> bool:
        return any(name in self.kwargs for name in names) or 0 <= place < len(self.args)


def arithmetic(op: ast.operator, left: Known | None, right: Known | None, where: str) -> Known | None:
    if left is None or right is None:
        return None
    a, b, sure = left.value, right.value, min(left.sure, right.sure)
    if isinstance(a, str) and isinstance(b, str):
        both = os.path.join(a, b) if isinstance(op, ast.Div) else a + b if isinstance(op, ast.Add) else None
        return Known(both, where, sure) if both is not None and len(both) <= LONGEST_TEXT else None
    if not (isinstance(a, int | float) and isinstance(b, int | float)) or type(op) not in _ARITHMETIC:
        return None
    if max(abs(a), abs(b)) > LARGEST_NUMBER or (isinstance(op, ast.Pow) and abs(b) > 64):
        return None
    try:
        result = _ARITHMETIC[type(op)](a, b)
    except (ArithmeticError, ValueError):
        return None
    return Known(result, where, sure) if isinstance(result, int | float) and abs(result) < LARGEST_NUMBER else None


def compared(op: ast.cmpop, left: Known | None, right: Known | None, where: str) -> Known | None:
    if left is None or right is None or not (left.constant and right.constant) or type(op) not in _COMPARED:
        return None
    return Known(_COMPARED[type(op)](left.value, right.value), where, min(left.sure, right.sure))


def item(base: Known | None, index: Known | None) -> Known | None:
    if base is None or index is None:
        return None
    if isinstance(base.value, dict):
        return base.value.get(str(index.value))
    if isinstance(base.value, list) and type(index.value) is int and -len(base.value) <= index.value < len(base.value):
        return base.value[index.value]  # type: ignore[no-any-return]  # the items are Known
    return None


def result_of(site: CallSite, base: Known | None) -> Known | None:
    """Return the value that a call to a Python builtin returns, or None if the value is unknown. `base`: the object
    whose method is called.
    """
    if base is not None and (found := _result_of_method(site, base)) is not None:
        return found
    values = [arg.value for arg in site.args if arg is not None and arg.constant]
    known = bool(values) and len(values) == len(site.args)
    match site.dotted:
        case "open" if known and isinstance(values[0], str):
            return Known(NamedFile(values[0]), site.where, site.sure)
        case "os.environ.get" | "os.getenv" if len(site.args) > 1 and site.args[1] is not None:
            return site.args[1].with_scaled_certainty(0.6)
        case "dict" | "types.SimpleNamespace" | "argparse.Namespace":
            return Known({name: value for name, value in site.kwargs.items() if value is not None}, site.where)
        case "dataclasses.field" | "attrs.field" | "pydantic.Field":
            return site.argument(0 if site.dotted == "pydantic.Field" else -1, "default")
        case name if name in _WRAPPERS and site.args:
            return site.args[0]
        case name if name in _COMPUTED and known and not (name in _CONVERTS and site.kwargs):
            if name in _CONVERTS and any(isinstance(value, str) and len(value) > 40 for value in values):
                return None
            try:
                result = _COMPUTED[name](*values)
            except (TypeError, ValueError, ArithmeticError):
                return None
            too_long = isinstance(result, range) and abs(result.start) + abs(result.stop) >= 2**62
            return Known(result, site.where, site.sure) if not too_long else None
    return None


def _result_of_method(site: CallSite, base: Known) -> Known | None:
    value, name = base.value, site.last
    first = site.args[0] if site.args else None
    if isinstance(value, dict) and name == "get" and first is not None:
        default = site.args[1] if len(site.args) > 1 else None
        return value.get(str(first.value)) or (default.with_scaled_certainty(0.8) if default is not None else None)
    if isinstance(value, NamedFile) and name == "read":
        return base
    if not isinstance(value, str):
        return None
    if name in ("read_text", "read_bytes", "open"):
        return Known(NamedFile(value), site.where, site.sure)
    if name == "joinpath" and first is not None and isinstance(first.value, str):
        return Known(os.path.join(value, first.value), site.where, site.sure)
    return base if name in _SAME_TEXT else None


def option_name_and_default(site: CallSite) -> tuple[str, Known] | None:
    names = [str(arg.value) for arg in site.args if arg is not None and isinstance(arg.value, str)]
    if not names:
        return None
    # click uses the last text without dashes as the parameter's name. argparse uses `dest`, or the longest option.
    named, bare = site.kwargs.get("dest"), [name for name in names if not name.startswith("-")]
    longest = max(names, key=lambda name: (name.startswith("--"), len(name)))
    dest = str(named.value) if named is not None and named.constant else bare[-1] if bare else longest
    action, default = site.kwargs.get("action"), site.kwargs.get("default")
    if default is None and action is not None and action.value in ("store_true", "store_false"):
        default = Known(action.value == "store_false", site.where, 0.9)
    return (dest.lstrip("-").replace("-", "_"), default) if default is not None else None


def read_config(name: str, form: str, folders: OwnFolders, *, beside: Path | None) -> Known:
    path = folders.find(name, beside=beside)
    if path is None:
        raise NotReadError(f"{name}: not read: the given folders have no such file")
    text, shown = folders.read(path), folders.name_of(path)
    try:
        return _ConfigLines(text, shown).value(_parsed(text, form), depth=0)
    except (ValueError, RecursionError, MemoryError, TypeError) as error:
        raise NotReadError(f"{shown}: not used: {str(error).splitlines()[0][:120] if str(error) else form}") from None


def _parsed(text: str, form: str) -> Any:
    if form != "yaml":
        return json.loads(text) if form == "json" else tomllib.loads(text)
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError("PyYAML is not installed") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from None


class _ConfigLines:
    """Finds the line of each value in a config file. This is the first line that contains the value's key, after the
    line of the table that contains the value.
    """

    def __init__(self, text: str, shown: str) -> None:
        self._lines = text.splitlines()
        self._shown = shown
        self._left = MOST_VALUES

    def value(self, data: Any, *, depth: int, line: int = 0) -> Known:
        self._left -= 1
        if self._left < 0 or depth > DEEPEST:
            raise ValueError(f"it has more than {MOST_VALUES} values or is deeper than {DEEPEST}")
        where = f"{self._shown}:{line + 1}"
        if isinstance(data, dict):
            lines = {key: self._line_of(str(key), line) for key in data}
            return Known({str(k): self.value(v, depth=depth + 1, line=lines[k]) for k, v in data.items()}, where)
        if isinstance(data, list):
            return Known([self.value(each, depth=depth + 1, line=line) for each in data], where)
        return Known(data if data is None or isinstance(data, str | int | float | bool) else str(data), where)

    def _line_of(self, key: str, start: int) -> int:
        after = range(start, min(len(self._lines), start + 2_000))
        return next((number for number in after if key in self._lines[number]), start)
