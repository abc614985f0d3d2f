"""Read a limited number of source and config files in the user's folders, and extract the values in them."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import operator
import os
import stat
import tomllib
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stoker.units import show_bytes

Function = ast.FunctionDef | ast.AsyncFunctionDef
ADD_ARGUMENT = "add_argument"
MOST_FILES, LONGEST_FILE_BYTES, MOST_BYTES = 40, 1_000_000, 4_000_000
DEEPEST_CALLS, MOST_NODES = 8, 100_000
"""Maximum depth of followed calls, and maximum number of visited syntax nodes."""
INSTALLED = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})


class NotReadError(Exception):
    """A file or source was not read to its end. The text of the error contains the reason."""


class UserFolders:
    """Reads files in the user's folders. `texts`: contents of the read files, by real path."""

    def __init__(self, folders: Iterable[str | os.PathLike[str]]) -> None:
        self.roots = tuple(dict.fromkeys(Path(os.path.realpath(folder)) for folder in folders))
        self.texts: dict[Path, str] = {}
        self._bytes = 0

    def read(self, path: Path) -> str:
        """Return the text of a file. Raises NotReadError if the file cannot be read."""
        try:
            real = Path(os.path.realpath(path))
            above = [root for root in self.roots if real.is_relative_to(root)]
            if all(INSTALLED.intersection(real.relative_to(root).parts) for root in above):
                raise ValueError("the file is outside the user's folders")
            if real not in self.texts:
                if len(self.texts) >= MOST_FILES:
                    raise ValueError(f"the limit of {MOST_FILES} files is reached")
                self.texts[real] = self._read_regular_file(real)
            return self.texts[real]
        except UnicodeDecodeError:
            why = "it is not UTF-8 text"
        except (OSError, ValueError) as error:  # a null byte in the path raises ValueError
            why = getattr(error, "strerror", None) or str(error)
        raise NotReadError(f"{self.display_name(path)}: not read: {why}")

    def _read_regular_file(self, real: Path) -> str:
        # With O_NONBLOCK, `os.open` does not wait for a writer if the file is a named pipe.
        with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            if status.st_size > LONGEST_FILE_BYTES:
                raise ValueError(f"it has {show_bytes(status.st_size)}, more than {show_bytes(LONGEST_FILE_BYTES)}")
            if self._bytes + status.st_size > MOST_BYTES:
                raise ValueError(f"the limit of {show_bytes(MOST_BYTES)} of source is reached")
            data = opened.read(LONGEST_FILE_BYTES)
        self._bytes += len(data)
        return data.decode("utf-8-sig")

    def display_name(self, path: Path) -> str:
        place = Path(os.path.abspath(path))
        return next((str(place.relative_to(root)) for root in self.roots if place.is_relative_to(root)), str(path))

    def list_files(self) -> Iterator[str]:
        for root in self.roots:
            for folder, folders, files in os.walk(root):
                folders[:] = sorted(name for name in folders if name not in INSTALLED and not name.startswith("."))
                yield from (self.display_name(Path(folder, name)) for name in sorted(files) if not name.startswith("."))


# ---- modules


def parse_source(text: str, shown: str) -> ast.Module:
    """Return the syntax tree of source code. Raises NotReadError if the source code cannot be parsed."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise NotReadError(f"{shown}: not read: line {error.lineno or 0} does not parse: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotReadError(f"{shown}: not read: it does not parse: {error}") from None


def find_module_file(parts: Sequence[str], places: Iterable[Path]) -> Path | None:
    """Return the file of a module or package below one of the folders `places`."""
    bases = [place.joinpath(*parts) for place in places]
    files = [file for base in bases for file in (base.with_name(f"{base.name}.py"), base / "__init__.py")]
    return next(filter(os.path.lexists, files), None)


class SourceModule:
    """A user's module. `unscanned_statements`: statements that are not scanned yet, by the name that they bind.
    `star_imports`: modules that the module imports with `from M import *`.
    """

    def __init__(self, file: Path | None, shown: str, tree: ast.Module) -> None:
        self.file = file
        self.shown = shown
        self.names = {"__name__": KnownValue(file.stem if file is not None else "source")}
        if file is not None:
            self.names["__file__"] = KnownValue(str(file))
        self.star_imports: list[SourceModule] = []
        self.unscanned_statements: dict[str, list[ast.stmt]] = {}
        for statement in tree.body:
            for name in dict.fromkeys(_bound_names(statement)):
                self.unscanned_statements.setdefault(name, []).append(statement)


def _bound_names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name.partition(".")[0] for alias in aliases]
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=attr) as function)):
            return [ADD_ARGUMENT] if attr == ADD_ARGUMENT else _root_variable(function)
        case ast.Expr(value=ast.Call()):
            return []
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target, *_]):
            return _root_variable(target)
    names = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    inside = (child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt))
    return names + [name for child in inside for name in _bound_names(child)]


def _root_variable(node: ast.expr) -> list[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return [node.id] if isinstance(node, ast.Name) else []


@dataclasses.dataclass(eq=False, slots=True)
class Scope:
    """Visible names in a piece of code. `sure`: factor for the certainty of facts."""

    names: ChainMap[str, KnownValue]
    module: SourceModule
    sure: float = 1.0
    depth: int = 0
    returned: KnownValue | None = None

    def location_of(self, node: ast.AST) -> str:
        return f"{self.module.shown}:{getattr(node, 'lineno', 0)}"


@dataclasses.dataclass(frozen=True, slots=True)
class UserCode:
    """A function or class of the user, with the scope that defines it. `bound_instance`: the instance to which a method
    belongs.
    """

    node: Function | ast.ClassDef
    defining_scope: Scope
    bound_instance: KnownValue | None = None


# ---- config files


CONFIG_READERS = {
    "json.load": "json", "json.loads": "json", "tomllib.load": "toml", "tomllib.loads": "toml", "tomli.load": "toml",
    "tomli.loads": "toml", "toml.load": "toml", "yaml.safe_load": "yaml", "yaml.load": "yaml",
    "yaml.full_load": "yaml", "omegaconf.OmegaConf.load": "yaml",
}  # fmt: skip

MOST_VALUES, DEEPEST = 5_000, 20
"""Maximum number of values in a config file, and maximum nesting depth. With YAML aliases, a short file can represent
billions of values."""


def read_config(name: str, form: str, folders: UserFolders, *, reading_file: Path | None) -> KnownValue:
    """Return the values of a config file. Raises NotReadError."""
    places = [*([reading_file.parent] if reading_file is not None else []), *folders.roots]
    path = next((place / name for place in places if os.path.isfile(place / name)), None)
    if path is None:
        raise NotReadError(f"{name}: not read: the user's folders have no such file")
    text, shown = folders.read(path), folders.display_name(path)
    left = MOST_VALUES

    def known(data: Any, depth: int) -> KnownValue:
        nonlocal left
        left -= 1
        if left < 0 or depth > DEEPEST:
            raise ValueError(f"it has more than {MOST_VALUES} values or is nested deeper than {DEEPEST} levels")
        value: Any = data
        if isinstance(data, list):
            value = [known(each, depth + 1) for each in data]
        elif isinstance(data, dict):
            value = {str(key): known(each, depth + 1) for key, each in data.items()}
        elif data is not None and not isinstance(data, str | int | float | bool):
            value = str(data)
        return KnownValue(value)

    try:
        loads = {"json": json.loads, "toml": tomllib.loads}.get(form) or importlib.import_module("yaml").safe_load
        return known(loads(text), 0)
    except Exception as error:  # PyYAML may be missing, and the file may be damaged in any way
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise NotReadError(f"{shown}: not used: {why}") from None


# ---- values


@dataclasses.dataclass(frozen=True, slots=True)
class KnownValue:
    """A value with its certainty. `value`: a constant, a range, a list of `KnownValue`, a dict of `KnownValue` by
    name, or an instance of a class below or of `UserCode`."""

    value: Any
    sure: float = 0.95

    def with_certainty_factor(self, factor: float) -> KnownValue:
        return KnownValue(self.value, self.sure * factor)

    @property
    def is_constant(self) -> bool:
        return self.value is None or isinstance(self.value, str | int | float | bool)


@dataclasses.dataclass(frozen=True, slots=True)
class ImportedName:
    """An imported name, such as `torch.float16`. The name of a call's result ends with `()`. `places`: folders that may
    contain the module.
    """

    dotted: str
    places: tuple[Path, ...] = ()

    @property
    def last(self) -> str:
        return self.dotted.rpartition(".")[2]


@dataclasses.dataclass(frozen=True, slots=True)
class NamedFile:
    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallSite:
    """A call of an installed function, such as `torch.load` (`?.to` for a method of an unknown object). An unknown
    argument is None.
    """

    dotted: str
    args: tuple[KnownValue | None, ...]
    kwargs: dict[str, KnownValue | None]
    where: str
    sure: float

    @property
    def last(self) -> str:
        return self.dotted.rpartition(".")[2]

    def find_argument(self, place: int, *names: str) -> KnownValue | None:
        named = next((name for name in names if name in self.kwargs), None)
        if named is not None:
            return self.kwargs[named]
        return self.args[place] if place < len(self.args) else None


# ---- results of builtins and known functions


LONGEST_TEXT = 10_000
LARGEST_NUMBER = 1e18

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip
_CONVERTS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "max": max, "min": min, "len": len}
_COMPUTED: dict[str, Callable[..., Any]] = {
    **_CONVERTS, "range": range, "tqdm.trange": range, "tqdm.auto.trange": range, "os.path.join": os.path.join,
    "pathlib.Path": os.path.join, "os.path.abspath": os.path.join, "os.path.dirname": os.path.dirname,
}  # fmt: skip
_WRAPPERS = frozenset({"tqdm.tqdm", "tqdm", "tqdm.auto.tqdm", "enumerate", "reversed", "list"})
_SAME_TEXT = frozenset({"resolve", "absolute", "expanduser", "lower", "strip"})


def compute_arithmetic(op: ast.operator, left: KnownValue | None, right: KnownValue | None) -> KnownValue | None:
    if left is None or right is None:
        return None
    a, b, sure = left.value, right.value, min(left.sure, right.sure)
    if isinstance(a, str) and isinstance(b, str):
        both = os.path.join(a, b) if isinstance(op, ast.Div) else a + b if isinstance(op, ast.Add) else ""
        return KnownValue(both, sure) if 0 < len(both) <= LONGEST_TEXT else None
    if not (isinstance(a, int | float) and isinstance(b, int | float)) or type(op) not in _ARITHMETIC:
        return None
    if max(abs(a), abs(b)) > LARGEST_NUMBER or (isinstance(op, ast.Pow) and abs(b) > 64):
        return None
    try:
        result = _ARITHMETIC[type(op)](a, b)
    except ArithmeticError:
        return None
    return KnownValue(result, sure) if isinstance(result, int | float) and abs(result) < LARGEST_NUMBER else None


def get_item(base: KnownValue | None, index: KnownValue | None) -> KnownValue | None:
    if base is None or index is None:
        return None
    if isinstance(base.value, dict):
        return base.value.get(str(index.value))
    if isinstance(base.value, list) and type(index.value) is int and -len(base.value) <= index.value < len(base.value):
        return base.value[index.value]  # type: ignore[no-any-return]  # the items are `KnownValue`s
    return None


def compute_call_result(site: CallSite) -> KnownValue | None:
    """Return the result of a call if its function is known, else None."""
    values = [arg.value for arg in site.args if arg is not None and arg.is_constant]
    known = bool(values) and len(values) == len(site.args)
    match site.dotted:
        case "open" if known and isinstance(values[0], str):
            return KnownValue(NamedFile(values[0]), site.sure)
        case "os.environ.get" | "os.getenv" if len(site.args) > 1 and site.args[1] is not None:
            return site.args[1].with_certainty_factor(0.6)
        case "dict" | "types.SimpleNamespace" | "argparse.Namespace":
            return KnownValue({name: value for name, value in site.kwargs.items() if value is not None})
        case "dataclasses.field" | "attrs.field":
            return site.kwargs.get("default")
        case "pydantic.Field":
            return site.find_argument(0, "default")
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
            return KnownValue(result, site.sure) if not too_long else None
    return None


def compute_method_result(site: CallSite, base: KnownValue | None) -> KnownValue | None:
    first = site.args[0] if site.args else None
    match base.value if base is not None else None, site.last:
        case dict() as named, "get" if first is not None:
            default = site.args[1] if len(site.args) > 1 else None
            return named.get(str(first.value)) or (default.with_certainty_factor(0.8) if default is not None else None)
        case (NamedFile(), "read"):
            return base
        case str() as path, "read_text" | "read_bytes" | "open":
            return KnownValue(NamedFile(path), site.sure)
        case str() as path, "joinpath" if first is not None and isinstance(first.value, str):
            return KnownValue(os.path.join(path, first.value), site.sure)
        case str(), name if name in _SAME_TEXT:
            return base
    return None


def read_option(site: CallSite) -> dict[str, KnownValue]:
    """Return a dict with the name and the default of an argparse or click option; empty without a default."""
    names = [str(arg.value) for arg in site.args if arg is not None and isinstance(arg.value, str)]
    # click uses the last text without dashes as the parameter's name. argparse uses `dest`, or the longest option.
    named, bare = site.kwargs.get("dest"), [name for name in names if not name.startswith("-")]
    longest = max(names, key=lambda name: (name.startswith("--"), len(name)), default="")
    dest = str(named.value) if named is not None and named.is_constant else bare[-1] if bare else longest
    action, default = site.kwargs.get("action"), site.kwargs.get("default")
    if default is None and action is not None and action.value in ("store_true", "store_false"):
        default = KnownValue(action.value == "store_false", 0.9)
    return {dest.lstrip("-").replace("-", "_"): default} if dest and default is not None else {}
