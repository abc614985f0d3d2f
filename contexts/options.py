"""What `@context(...)` may be told, checked where it is written: an error names the option."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable
from typing import Any, Literal

from stoker.contexts.recipe import Awareness, LibraryLimits, Needs
from stoker.errors import RecipeError
from stoker.units import LONGEST_S, MOST_AT_ONCE, MOST_BYTES, MOST_NUMBER, parse_bytes, parse_seconds

Size = str | Literal[0] | None


class ContextOptions:
    """What `@context(...)` was told, checked: sizes and times are read here, so that an error names the option."""

    def __init__(
        self,
        *,
        memory: Size = None,
        device_memory: Size = None,
        disk: Size = None,
        devices: int = 1,
        kinds: Iterable[str] = (),
        slots: int | str = 1,
        load_limit: str | float = "30 min",
        files: Iterable[str | os.PathLike[str]] = (),
        preload: Iterable[str] | None = None,
        awareness: str | Awareness = "full",
        calls_per_library: int = 0,
        min_libraries: int = 0,
        max_libraries: int | None = None,
        keep_alive: str | float | None = None,
    ) -> None:
        self.needs = Needs(
            devices=_count("devices", devices, least=1),
            device_memory_bytes=_size("device_memory", device_memory),
            memory_bytes=_size("memory", memory),
            disk_bytes=_size("disk", disk),
            kinds=_names("kinds", kinds),
            load_limit_s=_seconds("load_limit", load_limit),
        )
        self.slots = _slots(slots)
        self.calls_per_library = _count("calls_per_library", calls_per_library, least=0, most=MOST_NUMBER)
        self.files = _paths("files", files)
        self.preload = None if preload is None else _names("preload", preload)
        self.awareness = _awareness(awareness)
        if self.awareness is not Awareness.FULL:  # what does not outlive a call has no second one
            self.calls_per_library = self.calls_per_library or 1
        self.limits = _limits(min_libraries, max_libraries, keep_alive)


_OPTIONS = tuple(inspect.signature(ContextOptions).parameters)


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options, if `@context` has them all. Raises RecipeError with the nearest name."""
    for name in options:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(_OPTIONS)}"
            raise RecipeError(f"@context has no option {name!r}{hint}", option=name)
    return options


def _size(option: str, value: Size) -> int:
    if value is None:
        return 0
    try:
        size = parse_bytes(value)
    except (ValueError, OverflowError) as error:
        raise _wrong(option, value, str(error)) from None
    if size > MOST_BYTES:
        raise _wrong(option, value, "no machine has that much")
    return size


def _seconds(option: str, value: str | float, *, none_left: str = "it leaves no time to load") -> float:
    """A time; one of no length is refused with `none_left`, unless that is empty."""
    try:
        seconds = parse_seconds(value)
    except (ValueError, OverflowError) as error:
        raise _wrong(option, value, str(error)) from None
    if none_left and seconds <= 0:
        raise _wrong(option, value, none_left)
    if seconds > LONGEST_S:
        raise _wrong(option, value, 'write a time that is over one day, as in "30 min"')
    return seconds


def _limits(least: Any, most: Any, keep_alive: Any) -> LibraryLimits:
    _count("min_libraries", least, least=0)
    if most is not None:
        _count("max_libraries", most, least=1)
        if least > most:
            raise _wrong("min_libraries", least, f"max_libraries = {most} allows no more than that")
    kept_s = None if keep_alive is None else _seconds("keep_alive", keep_alive, none_left="")
    return LibraryLimits(least, most or 0, kept_s)


def _count(option: str, value: Any, *, least: int, most: int = MOST_AT_ONCE) -> int:
    if type(value) is not int or value < least:
        raise _wrong(option, value, f"write a whole number, {least} or more")
    if value > most:
        raise _wrong(option, value, f"it may be {most:,} at most")
    return value


def _slots(value: Any) -> int:
    """A library's calls at once; 0 stands for `"auto"`: as many as the loaded context allows."""
    if value == "auto":
        return 0
    if type(value) is not int or value < 1:
        raise _wrong("slots", value, 'write a whole number, 1 or more, or "auto"')
    return _count("slots", value, least=1)


def _names(option: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(name, str) and name for name in names):
        raise _wrong(option, value, f"write names, as in {option}=['...', '...']")
    return names


def _paths(option: str, value: Any) -> tuple[str, ...]:
    single = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
    paths = [os.fspath(each) if isinstance(each, os.PathLike) else each for each in ([value] if single else value)]
    if not all(isinstance(path, str) and path for path in paths):
        raise _wrong(option, value, f"write paths, or names of the loader's parameters, as in {option}=['...', '...']")
    return tuple(paths)


def _wrong(option: str, value: Any, problem: str) -> RecipeError:
    """The error for an option; a long value is cut."""
    shown = repr(value)
    return RecipeError(
        f"@context({option}={shown if len(shown) < 80 else shown[:77] + '...'}): {problem}", option=option
    )


def _awareness(value: str | Awareness) -> Awareness:
    try:
        return Awareness(value)
    except ValueError:
        names = ", ".join(level.value for level in Awareness)
        raise _wrong("awareness", value, f"write one of {names}") from None
