"""Values that stand in a source, each with its place, and the results of calls and configs that they determine."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import operator
import os.path
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.manager.advice.source.reading import NotReadError, OwnFolders

LONGEST_TEXT = 10_000
LARGEST_NUMBER = 1e18
MOST_VALUES, DEEPEST = 5_000, 20
"""Bounds of a config: aliases of YAML can make a short file stand for billions of values."""

CONFIG_READERS = {
    "json.load": "json", "json.loads": "json", "tomllib.load": "toml", "tomllib.loads": "toml", "tomli.load": "toml",
    "tomli.loads": "toml", "toml.load": "toml", "yaml.safe_load": "yaml", "yaml.load": "yaml",
    "yaml.full_load": "yaml", "omegaconf.OmegaConf.load": "yaml",
}  # fmt: skip
"""Calls that read a config, and its format."""

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
_WRAPPERS = frozenset({"tqdm.tqdm", "tqdm", "tqdm.auto.tqdm", "enumerate", "reversed", "list"})
_SAME_TEXT = frozenset({"resolve", "absolute", "expanduser", "lower", "strip"})


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A value with its place (`file:line`) and its certainty. `value` is a constant, a list of Known, a dict of Known
    by name (options, an instance, a config), a range, or one of the classes below."""

    value: Any
    where: str
    sure: float = 0.95

    def weakened(self, factor: float) -> Known:
        """Return the same value, less sure."""
        return Known(self.value, self.where, self.sure * factor)

    @property
    def constant(self) -> bool:
        """True for a text, a number, a truth value or None."""
        return self.value is None or isinstance(self.value, str | int | float | bool)


@dataclasses.dataclass(frozen=True, slots=True)
class InstalledName:
    """A name of installed code, for example `torch.float16`; the result of a call ends with `()`."""

    dotted: str

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.dotted.rpartition(".")[2]


@dataclasses.dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that the source opens or reads."""

    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallSite:
    """A call of installed code: its dotted name (`?.to` on an unknown object), and its arguments where known."""

    dotted: str
    args: tuple[Known | None, ...]
    kwargs: dict[str, Known | None]
    where: str
    sure: float

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.dotted.rpartition(".")[2]

    def argument(self, place: int, *names: str) -> Known | None:
        """Return the argument at a place or of one of these names; None if it is not given or not known."""
        named = next((name for name in names if name in self.kwargs), None)
        if named is not None:
            return self.kwargs[named]
        return self.args[place] if 0 <= place < len(self.args) else None

    def gives(self, place: int, *names: str) -> bool:
        """True if the argument is given, known or not."""
        return any(name in self.kwargs for name in names) or 0 <= place < len(self.args)


def arithmetic(op: ast.operator, left: Known | None, right: Known | None, where: str) -> Known | None:
    """Return the result of an operator on two constants, within bounds; a path for `/` on texts."""
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
    """Return whether two constants are equal, or differ."""
    if left is None or right is None or not (left.constant and right.constant) or type(op) not in _COMPARED:
        return None
    return Known(_COMPARED[type(op)](left.value, right.value), where, min(left.sure, right.sure))


def item(base: Known | None, index: Known | None) -> Known | None:
    """Return an item of a list or of named values."""
    if base is None or index is None:
        return None
    if isinstance(base.value, dict):
        return base.value.get(str(index.value))
    if isinstance(base.value, list) and type(index.value) is int and -len(base.value) <= index.value < len(base.value):
        return base.value[index.value]  # type: ignore[no-any-return]  # its items are Known
    return None


def result_of(site: CallSite, base: Known | None) -> Known | None:
    """Return the value of a call of Python's own functions and methods; None if the arguments do not determine it.
    `base`: the object whose method is called."""
    if base is not None and (found := _result_of_method(site, base)) is not None:
        return found
    values = [arg.value for arg in site.args if arg is not None and arg.constant]
    known = bool(values) and len(values) == len(site.args)
    match site.dotted:
        case "open" if known and isinstance(values[0], str):
            return Known(NamedFile(values[0]), site.where, site.sure)
        case "os.environ.get" | "os.getenv" if len(site.args) > 1 and site.args[1] is not None:
            return site.args[1].weakened(0.6)
        case "dict" | "types.SimpleNamespace" | "argparse.Namespace":
            return Known({name: value for name, value in site.kwargs.items() if value is not None}, site.where)
        case "dataclasses.field" | "attrs.field" | "pydantic.Field":
            return site.argument(0 if site.dotted == "pydantic.Field" else -1, "default")
        case name if name in _WRAPPERS and site.args:
            return site.args[0]
        case name if name in _COMPUTED and known and not site.kwargs:
            if name == "int" and len(str(values[0])) > 40:
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
        return value.get(str(first.value)) or (default.weakened(0.8) if default is not None else None)
    if isinstance(value, NamedFile) and name == "read":
        return base
    if not isinstance(value, str):
        return None
    if name in ("read_text", "read_bytes", "open"):
        return Known(NamedFile(value), site.where, site.sure)
    if name == "joinpath" and first is not None and isinstance(first.value, str):
        return Known(os.path.join(value, first.value), site.where, site.sure)
    return base if name in _SAME_TEXT else None


def declared_option(site: CallSite) -> tuple[str, Known] | None:
    """Return the destination and the default of an `add_argument(...)` or `click.option(...)`; None without default."""
    names = [str(arg.value) for arg in site.args if arg is not None and isinstance(arg.value, str)]
    if not names:
        return None
    # click names its parameter as the last text without dashes; argparse as `dest`, else as the longest option.
    named, bare = site.kwargs.get("dest"), [name for name in names if not name.startswith("-")]
    longest = max(names, key=lambda name: (name.startswith("--"), len(name)))
    dest = str(named.value) if named is not None and named.constant else bare[-1] if bare else longest
    action, default = site.kwargs.get("action"), site.kwargs.get("default")
    if default is None and action is not None and action.value in ("store_true", "store_false"):
        default = Known(action.value == "store_false", site.where, 0.9)
    return (dest.lstrip("-").replace("-", "_"), default) if default is not None else None


def read_config(name: str, form: str, folders: OwnFolders, *, beside: Path | None) -> Known:
    """Return the values of a config file that the source names. Raises NotReadError."""
    path = folders.find(name, beside=beside)
    if path is None:
        raise NotReadError(f"{name}: not read: the folders given have no such file")
    text, shown = folders.read(path), folders.name_of(path)
    try:
        return _ConfigLines(text, shown).value(_parsed(text, form), depth=0)
    except (ValueError, RecursionError, MemoryError, TypeError) as error:
        raise NotReadError(f"{shown}: not taken: {str(error).splitlines()[0][:120] if str(error) else form}") from None


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
        raise ValueError(f"it is no YAML: {error}") from None


class _ConfigLines:
    """Gives each value of a config the line of its key: the first with that text, after the line of its table."""

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
