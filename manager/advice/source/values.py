"""Values in source code, and the results of operators, builtins and other functions with known results."""

from __future__ import annotations

import ast
import dataclasses
import operator
import os.path
from collections.abc import Callable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A value with its place (`file:line`) and certainty. `value`: a constant, a list of Known, a dict of Known by
    name, a range, or an instance of a class below or of `OwnCode`."""

    value: Any
    where: str = ""
    sure: float = 0.95

    def scaled(self, factor: float) -> Known:
        return Known(self.value, self.where, self.sure * factor)

    @property
    def constant(self) -> bool:
        return self.value is None or isinstance(self.value, str | int | float | bool)


@dataclasses.dataclass(frozen=True, slots=True)
class ImportedName:
    """An imported name, such as `torch.float16`. A call's result ends with `()`. `places`: folders of the module."""

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
    """A call of an installed function, such as `torch.load`, or `?.to` for a method of an unknown object. An unknown
    argument is None."""

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
        return self.args[place] if place < len(self.args) else None


# ---- results of builtins and known functions


LONGEST_TEXT = 10_000
LARGEST_NUMBER = 1e18

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip
_CONVERTS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "max": max, "min": min, "len": len,
}  # fmt: skip
_COMPUTED: dict[str, Callable[..., Any]] = {
    **_CONVERTS, "range": range, "tqdm.trange": range, "tqdm.auto.trange": range, "os.path.join": os.path.join,
    "pathlib.Path": os.path.join, "os.path.abspath": os.path.join, "os.path.dirname": os.path.dirname,
}  # fmt: skip
_WRAPPERS = frozenset({"tqdm.tqdm", "tqdm", "tqdm.auto.tqdm", "enumerate", "reversed", "list"})
_SAME_TEXT = frozenset({"resolve", "absolute", "expanduser", "lower", "strip"})


def arithmetic(op: ast.operator, left: Known | None, right: Known | None, where: str) -> Known | None:
    if left is None or right is None:
        return None
    a, b, sure = left.value, right.value, min(left.sure, right.sure)
    if isinstance(a, str) and isinstance(b, str):
        both = os.path.join(a, b) if isinstance(op, ast.Div) else a + b if isinstance(op, ast.Add) else ""
        return Known(both, where, sure) if 0 < len(both) <= LONGEST_TEXT else None
    if not (isinstance(a, int | float) and isinstance(b, int | float)) or type(op) not in _ARITHMETIC:
        return None
    if max(abs(a), abs(b)) > LARGEST_NUMBER or (isinstance(op, ast.Pow) and abs(b) > 64):
        return None
    try:
        result = _ARITHMETIC[type(op)](a, b)
    except ArithmeticError:
        return None
    return Known(result, where, sure) if isinstance(result, int | float) and abs(result) < LARGEST_NUMBER else None


def item(base: Known | None, index: Known | None) -> Known | None:
    if base is None or index is None:
        return None
    if isinstance(base.value, dict):
        return base.value.get(str(index.value))
    if isinstance(base.value, list) and type(index.value) is int and -len(base.value) <= index.value < len(base.value):
        return base.value[index.value]  # type: ignore[no-any-return]  # the items are Known
    return None


def result(site: CallSite) -> Known | None:
    """Return the value that a known function returns."""
    values = [arg.value for arg in site.args if arg is not None and arg.constant]
    known = bool(values) and len(values) == len(site.args)
    match site.dotted:
        case "open" if known and isinstance(values[0], str):
            return Known(NamedFile(values[0]), site.where, site.sure)
        case "os.environ.get" | "os.getenv" if len(site.args) > 1 and site.args[1] is not None:
            return site.args[1].scaled(0.6)
        case "dict" | "types.SimpleNamespace" | "argparse.Namespace":
            return Known({name: value for name, value in site.kwargs.items() if value is not None}, site.where)
        case "dataclasses.field" | "attrs.field":
            return site.kwargs.get("default")
        case "pydantic.Field":
            return site.argument(0, "default")
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


def result_of_method(site: CallSite, base: Known | None) -> Known | None:
    first = site.args[0] if site.args else None
    match base.value if base is not None else None, site.last:
        case dict() as named, "get" if first is not None:
            default = site.args[1] if len(site.args) > 1 else None
            return named.get(str(first.value)) or (default.scaled(0.8) if default is not None else None)
        case (NamedFile(), "read"):
            return base
        case str() as path, "read_text" | "read_bytes" | "open":
            return Known(NamedFile(path), site.where, site.sure)
        case str() as path, "joinpath" if first is not None and isinstance(first.value, str):
            return Known(os.path.join(path, first.value), site.where, site.sure)
        case str(), name if name in _SAME_TEXT:
            return base
    return None


def option(site: CallSite) -> dict[str, Known]:
    """Return the default of an argparse or click option, by its name; empty without a default."""
    names = [str(arg.value) for arg in site.args if arg is not None and isinstance(arg.value, str)]
    # click uses the last text without dashes as the parameter's name. argparse uses `dest`, or the longest option.
    named, bare = site.kwargs.get("dest"), [name for name in names if not name.startswith("-")]
    longest = max(names, key=lambda name: (name.startswith("--"), len(name)), default="")
    dest = str(named.value) if named is not None and named.constant else bare[-1] if bare else longest
    action, default = site.kwargs.get("action"), site.kwargs.get("default")
    if default is None and action is not None and action.value in ("store_true", "store_false"):
        default = Known(action.value == "store_false", site.where, 0.9)
    return {dest.lstrip("-").replace("-", "_"): default} if dest and default is not None else {}
