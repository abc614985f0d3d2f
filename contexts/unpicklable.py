"""Find the part of a value that cannot be pickled, by pickling the parts one by one."""

from __future__ import annotations

import collections
import functools
import io
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from stoker.contexts.by_value import ByValuePickler, OpenHandleError, is_open_handle
from stoker.contexts.function_code import find_attribute_names
from stoker.contexts.user_code import is_installed, qualified_class_name

_SENT_FROM_LIBRARY = ("result", "checkpoint", "piece", "exception")
_ADVICE_BY_FUTURE_KIND = {"a future": "its .result()", "a future of asyncio": "the value that it gives when awaited"}
_MAX_TRIES = 300
_MAX_DEPTH = 8


def explain_pickling_error(value: Any, error: BaseException, *, what: str) -> str:
    """Describe in words which part of the value cannot be pickled, why, and what to do."""
    try:
        path, culprit, why = _find_unpicklable_part(value, error, what=what)
    except Exception:  # an error of the search must not hide the original error
        path, culprit, why = "", value, error
    if kind := find_future_kind(culprit):
        advice = f"Pass {_ADVICE_BY_FUTURE_KIND[kind]}"
        if what in _SENT_FROM_LIBRARY:
            advice = "Wait for it in the function, and return its value"
        elif path.startswith("argument") and kind == "a future":
            return f"{path} is a future, and only futures that are arguments themselves are waited for. {advice}."
        return _explain_cannot_leave(kind, "is", path, advice, what=what)
    if isinstance(why, OpenHandleError):
        advice = f"{why.advice[:1].upper()}{why.advice[1:]}"
        if what in _SENT_FROM_LIBRARY:
            advice = "Read it in the function and return its content, or return its path"
        return _explain_cannot_leave(why.what, "is" if is_open_handle(culprit) else "holds", path, advice, what=what)
    if what in _SENT_FROM_LIBRARY:
        goes, advice = "back to the program", "Return what it is made from instead: numbers, texts, arrays"
    else:
        goes = "to a library"
        advice = "Make it inside the function or the context's loader, or pass what it is made from"
        if isinstance(culprit, types.ModuleType):
            advice = "Import it in the body of the function or of the context's loader"
    place, reason = f" at {path}" if path else "", _shorten(str(why) or type(why).__name__, 200)
    return f"the {what} can't be sent {goes}{place}: {_describe_type(culprit)} can't be pickled ({reason}). {advice}."


def find_future_kind(value: Any) -> str:
    """Return the kind of a future, or "" for other values."""
    for module, kind in zip(("concurrent.futures", "asyncio"), _ADVICE_BY_FUTURE_KIND, strict=True):
        future = getattr(sys.modules.get(module), "Future", None)
        if isinstance(future, type) and isinstance(value, future):
            return kind
    return ""


def _explain_cannot_leave(thing: str, verb: str, path: str, advice: str, *, what: str) -> str:
    if what in _SENT_FROM_LIBRARY:
        place = f"holds {thing} at {path}" if path else f"{verb} {thing}"
        return f"the {what} {place}, which can't leave the library. {advice}."
    subject = path if path.startswith("argument") else f"the {what} can't be sent to a library: {path or 'it'}"
    return f"{subject} {verb} {thing}, which can't leave the program. {advice}."


def _find_unpicklable_part(value: Any, error: BaseException, *, what: str) -> tuple[str, Any, BaseException]:
    path, culprit, why, tries = "", value, error, 0
    seen: set[int] = set()
    for _ in range(_MAX_DEPTH):
        seen.add(id(culprit))
        # Do not search the parts of a future or an open handle.
        parts = () if find_future_kind(culprit) or is_open_handle(culprit) else _iterate_parts(culprit)
        for step, part in parts:
            if id(part) in seen:
                continue
            tries += 1
            if tries > _MAX_TRIES:
                return path, culprit, why
            try:
                ByValuePickler(io.BytesIO(), protocol=5, buffer_callback=lambda _: False).dump(part)
            except Exception as failure:
                path, culprit, why = path + step, part, failure
                break
        else:
            break
    return _format_path(path, value, what=what), culprit, why


def _iterate_parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{_shorten(repr(key), 60)}]", part
            yield f" key {_shorten(repr(key), 60)}", key
    elif isinstance(value, tuple | list | set | frozenset | collections.deque):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with suppress(ValueError):  # empty closure cell
                yield f" variable {name!r} that it closes over", cell.cell_contents
        for index, part in enumerate(value.__defaults__ or ()):
            yield f" default value {index}", part
        for name in sorted(find_attribute_names(value.__code__) & value.__globals__.keys()):
            yield f" global {name!r} that it uses", value.__globals__[name]
    elif isinstance(value, types.MethodType):
        yield from ((" its object", value.__self__), (" its function", value.__func__))
    elif isinstance(value, functools.partial):
        yield " its function", value.func
        given: dict[Any, Any] = {**dict(enumerate(value.args)), **value.keywords}
        for name, part in given.items():
            yield f" bound argument {name}", part
    elif isinstance(value, type):
        if not is_installed(value.__module__):
            yield from ((f".{name}", part) for name, part in vars(value).items())
    elif not isinstance(value, types.ModuleType):
        yield from ((f".{name}", part) for name, part in _attributes_and_slots(value).items())


def _attributes_and_slots(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _format_path(path: str, value: Any, *, what: str) -> str:
    calls = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)
    if what == "argument" and calls and path.startswith(("[0][", "[1][")):
        name, _, rest = path[4:].partition("]")
        return f"argument {name}{', ' + rest.strip() if rest else ''}"
    # Omit `[0]`, the index of the function (or the recipe's loader) in its tuple.
    return path.removeprefix("[0]" if what in ("function", "recipe") else "").strip()


def _describe_type(value: Any) -> str:
    for kind, name in ((types.FunctionType, "function"), (type, "class"), (types.ModuleType, "module")):
        if isinstance(value, kind):
            return f"the {name} {getattr(value, '__qualname__', value.__name__)}"
    name = qualified_class_name(type(value))
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _shorten(text: str, most: int) -> str:
    return text if len(text) < most else text[: most - 3] + "..."
