"""What calls of Python's own functions and of common methods give, where their arguments are known."""

from __future__ import annotations

import os.path
from collections.abc import Callable
from typing import Any

from stoker.manager.advice.source.values import CallSite, FieldBag, InstalledName, Known, NamedFile

_NUMERIC: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "len": len,
    "max": max,
    "min": min,
    "round": round,
    "abs": abs,
}
_SAME_PATH = frozenset({"resolve", "absolute", "expanduser", "as_posix"})
_PATHS = frozenset({"pathlib.Path", "pathlib.PurePath", "os.fspath", "os.path.abspath", "os.path.realpath"})
_WRAPPERS = frozenset({"tqdm.tqdm", "tqdm", "tqdm.auto.tqdm", "enumerate", "iter", "reversed", "sorted", "list", "set"})


def result_of(site: CallSite, base: Known | None) -> Known | None:
    """The value of a call; None if it is none of those or its arguments are not known. `base`: whose method it is."""
    if base is not None:
        found = _of_method(site, base)
        if found is not None:
            return found
    values = [arg.value if arg is not None else None for arg in site.args]
    known = bool(values) and all(arg is not None and arg.constant for arg in site.args)
    texts = known and all(isinstance(value, str) for value in values)
    match site.dotted:
        case "range" | "tqdm.trange" | "tqdm.auto.trange" if known and len(values) <= 3:
            return _range(values, site)
        case "os.path.join" if texts:
            return Known(os.path.join(*map(str, values)), site.where, site.sure)
        case "os.path.dirname" if known and isinstance(values[0], str):
            return Known(os.path.dirname(values[0]), site.where, site.sure)
        case "open" | "builtins.open" if known and isinstance(values[0], str):
            return Known(NamedFile(values[0]), site.where, site.sure)
        case "os.environ.get" | "os.getenv" if len(site.args) > 1:
            default = site.args[1]
            return default.weakened(0.6) if default is not None else None
        case "dict" | "types.SimpleNamespace" | "argparse.Namespace":
            return Known(
                FieldBag({name: value for name, value in site.kwargs.items() if value is not None}), site.where
            )
        case "dataclasses.field" | "attrs.field" | "pydantic.Field":
            return site.argument(0 if site.dotted == "pydantic.Field" else -1, "default")
        case name if name in _PATHS and texts:
            return Known(os.path.join(*map(str, values)), site.where, site.sure)
        case name if name in _WRAPPERS and site.args:
            return site.args[0]
        case name if name in _NUMERIC and site.args and not site.kwargs:
            return _computed(_NUMERIC[name], values if known else [values[0]], site)
    return None


def _of_method(site: CallSite, base: Known) -> Known | None:
    value, name = base.value, site.last
    first = site.args[0] if site.args else None
    if isinstance(value, FieldBag) and name in ("get", "pop") and first is not None:
        found = value.fields.get(str(first.value))
        return found or (site.args[1].weakened(0.8) if len(site.args) > 1 and site.args[1] is not None else None)
    if isinstance(value, NamedFile) and name == "read":
        return base
    if not isinstance(value, str):
        return None
    if name in ("read_text", "read_bytes", "open"):
        return Known(NamedFile(value), site.where, site.sure)
    if name in _SAME_PATH:
        return base
    if name == "joinpath" and first is not None and isinstance(first.value, str):
        return Known(os.path.join(value, first.value), site.where, site.sure)
    if name in ("lower", "upper", "strip") and not site.args:
        return Known(getattr(value, name)(), site.where, site.sure)
    if name == "format":
        constants = [arg.value for arg in site.args if arg is not None and arg.constant]
        named = {key: arg.value for key, arg in site.kwargs.items() if arg is not None and arg.constant}
        simple = len(constants) == len(site.args) and ":" not in value and "." not in value and "[" not in value
        if simple and len(value) < 1_000:
            try:
                return Known(value.format(*constants, **named), site.where, site.sure)
            except (IndexError, KeyError, ValueError):
                return None
    return None


def _range(values: list[Any], site: CallSite) -> Known | None:
    try:
        found = range(*values)
        return Known(found, site.where, site.sure) if abs(found.start) + abs(found.stop) < 2**62 else None
    except (TypeError, ValueError):
        return None


def _computed(function: Callable[..., Any], values: list[Any], site: CallSite) -> Known | None:
    if function in (int, float, round) and any(isinstance(value, str) and len(value) > 40 for value in values):
        return None
    try:
        result = function(*values)
    except (TypeError, ValueError, ArithmeticError):
        return None
    return Known(result, site.where, site.sure) if isinstance(result, str | int | float) else None


def name_of_call(base: Known | None, attr: str) -> str:
    """The dotted name of a method's call: of installed code by its full name, of something else `?.attr`."""
    return f"{base.value.dotted}.{attr}" if base is not None and isinstance(base.value, InstalledName) else f"?.{attr}"
