"""Find the part of a value that cannot be pickled. The search pickles the parts one by one."""

from __future__ import annotations

import collections
import functools
import io
import sys
import types
from collections.abc import Iterator
from typing import Any

from stoker.contexts.by_value import ByValuePickler, OpenHandle, is_open_handle
from stoker.contexts.function_code import attribute_names
from stoker.contexts.user_code import is_installed, qualified_class_name

_FROM_LIBRARY = ("result", "checkpoint", "piece", "exception")
_TRIES = 300
_DEPTH = 8


def explain(value: Any, error: BaseException, *, what: str) -> str:
    """Return a sentence that names the unpicklable part, the reason and advice."""
    try:
        path, culprit, why = _search(value, error, what=what)
    except Exception:  # an error of the search must not hide the original error
        path, culprit, why = "", value, error
    if kind := future_kind(culprit):
        return _future_advice(path, kind, what=what)
    if isinstance(why, OpenHandle):
        return _handle_advice(path, why, is_itself=is_open_handle(culprit), what=what)
    place = f" at {path}" if path else ""
    if what in ("result", "checkpoint"):
        goes, advice = "back to the program", "Return what it is made from instead: numbers, texts, arrays"
    else:
        goes = "to a library"
        advice = "Make it inside the function or the context's loader, or pass what it is made from"
        if isinstance(culprit, types.ModuleType):
            advice = "Import it in the body of the function or of the context's loader"
    return f"the {what} can't be sent {goes}{place}: {_kind(culprit)} can't be pickled ({_short(why)}). {advice}."


def future_kind(value: Any) -> str:
    """Return the kind of a future, or "" for other values, without importing a module."""
    for module, kind in (("concurrent.futures", "a future"), ("asyncio", "a future of asyncio")):
        future = getattr(sys.modules.get(module), "Future", None)
        if isinstance(future, type) and isinstance(value, future):
            return kind
    return ""


def _future_advice(path: str, kind: str, *, what: str) -> str:
    value = "its .result()" if kind == "a future" else "the value that it gives when awaited"
    if what in ("result", "checkpoint"):
        place = f"holds {kind} at {path}" if path else f"is {kind}"
        return f"the {what} {place}, which can't leave the library. Wait for it in the function, and return its value."
    if path.startswith("argument") and kind == "a future":
        return (
            f"{path} is a future, and only a future that is itself an argument is waited for. Pass it as one, or"
            " pass its .result()."
        )
    if path.startswith("argument"):
        return f"{path} is {kind}, which can't leave the program. Pass {value}."
    place = f" at {path}" if path else ""
    return f"the {what} can't be sent to a library{place}: {kind} can't leave the program. Use {value}."


def _handle_advice(path: str, handle: OpenHandle, *, is_itself: bool, what: str) -> str:
    verb = "is" if is_itself else "holds"
    if what in _FROM_LIBRARY:
        place = f"holds {handle.what} at {path}" if path else f"{verb} {handle.what}"
        return (
            f"the {what} {place}, which can't leave the library. Read it in the function and return its content, or"
            " return its path."
        )
    advice = f"{handle.advice[:1].upper()}{handle.advice[1:]}."
    if path.startswith("argument"):
        return f"{path} {verb} {handle.what}, which can't leave the program. {advice}"
    place = f"{path or 'it'} {verb}"
    return f"the {what} can't be sent to a library: {place} {handle.what}, which can't leave the program. {advice}"


def _search(value: Any, error: BaseException, *, what: str) -> tuple[str, Any, BaseException]:
    path, culprit, why, tries = "", value, error, 0
    seen: set[int] = set()
    for _ in range(_DEPTH):
        if future_kind(culprit) or is_open_handle(culprit):  # the parts of a future or handle are irrelevant
            break
        seen.add(id(culprit))
        for step, part in _parts(culprit):
            if id(part) in seen:
                continue
            tries += 1
            if tries > _TRIES:
                return path, culprit, why
            failure = _failure(part)
            if failure is not None:
                path, culprit, why = path + step, part, failure
                break
        else:
            break
    return _tidy(path, value, what=what), culprit, why


def _failure(value: Any) -> BaseException | None:
    try:
        ByValuePickler(io.BytesIO(), protocol=5, buffer_callback=lambda _: False).dump(value)
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{_name(key)}]", part
            yield f" key {_name(key)}", key
    elif isinstance(value, tuple | list | set | frozenset | collections.deque):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=False):
            try:
                yield f" variable {name!r} that it closes over", cell.cell_contents
            except ValueError:  # the cell is empty
                continue
        for index, part in enumerate(value.__defaults__ or ()):
            yield f" default value {index}", part
        for name in sorted(attribute_names(value.__code__)):
            if name in value.__globals__:
                yield f" global {name!r} that it uses", value.__globals__[name]
    elif isinstance(value, types.MethodType):
        yield " its object", value.__self__
        yield " its function", value.__func__
    elif isinstance(value, functools.partial):
        yield " its function", value.func
        for index, part in enumerate(value.args):
            yield f" argument {index} that it was given ahead", part
        for name, part in value.keywords.items():
            yield f" argument {name} that it was given ahead", part
    elif isinstance(value, type):
        if not is_installed(value.__module__):
            for name, part in vars(value).items():
                yield f".{name}", part
    elif not isinstance(value, types.ModuleType):
        for name, part in _attributes(value).items():
            yield f".{name}", part


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _tidy(path: str, value: Any, *, what: str) -> str:
    calls = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)
    if what == "argument" and calls and path.startswith(("[0][", "[1][")):
        name, _, rest = path[4:].partition("]")
        return f"argument {name}{', ' + rest.strip() if rest else ''}"
    # the function, or the recipe's loader, is first in its tuple
    return path.removeprefix("[0]" if what in ("function", "recipe") else "").strip()


def _name(key: Any) -> str:
    return repr(key) if len(repr(key)) < 60 else repr(key)[:57] + "..."


def _kind(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"the function {value.__qualname__}"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if isinstance(value, types.ModuleType):
        return f"the module {value.__name__}"
    name = qualified_class_name(type(value))
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _short(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) < 200 else text[:197] + "..."
