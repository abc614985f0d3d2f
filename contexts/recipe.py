"""A recipe describes how to load a context, which files it needs, and its resource needs. Recipes with equal keys share
a context.
"""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Iterable
from typing import Any, Literal, TypedDict

import msgspec

from stoker.config_errors import suggest_similar_name
from stoker.contexts.folders import ProgramFolder
from stoker.errors import RecipeError
from stoker.units import (
    LONGEST_S,
    MOST_AT_ONCE,
    MOST_BYTES,
    MOST_NUMBER,
    parse_bytes,
    parse_seconds,
    show_bytes,
    show_seconds,
)


class Awareness(enum.Enum):
    """The parts of a context that are kept after a call (Pervasive Context Management §4.2)."""

    NONE = "none"
    """Each call starts a new interpreter and reads the files from their origin."""
    DISK = "disk"
    """Each call starts a new interpreter and reads the files from the pilot's object cache."""
    FULL = "full"
    """One library loads the context once and runs many calls."""


class ObjectRef(msgspec.Struct, frozen=True):
    """A file or folder named by its content. `source`: path of the content.

    `inode` and `changed_ns` identify the file; 0 if unknown, or if the file changed within the last two seconds.
    """

    name: str
    size_bytes: int
    source: str = ""
    changed_ns: int = 0
    inode: int = 0


class Needs(msgspec.Struct, frozen=True):
    """What a library requires from its pilot. Declared sizes are enforced limits; 0 = undeclared.

    `device_memory_bytes`: per device (on a CPU, the larger memory limit applies). `kinds`: suitable device kinds, best
    first; empty = any. The memory includes a cache of `cache_tokens` tokens with `token_bytes` each.
    """

    devices: int = 1
    device_memory_bytes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    kinds: tuple[str, ...] = ()
    load_limit_s: float = 1800.0
    token_bytes: int = 0
    cache_tokens: int = 0


class LibraryLimits(msgspec.Struct, frozen=True):
    """Limits of a context's loaded libraries (0 = unlimited). They are not part of a recipe's key.

    An idle library is unloaded after `keep_alive_s` seconds.
    """

    least: int = 0
    most: int = 0
    keep_alive_s: float | None = None


NO_LIMITS = LibraryLimits()


class Recipe(msgspec.Struct, frozen=True):
    """A context recipe.

    `key` identifies the content; `name` is for users (`llm-7f3a`). `loader`: cloudpickle of `(function, args, kwargs)`.
    `preload`: modules that the zygote imports. `slots`: concurrent calls of a library (0: see `count_slots`).
    `calls_per_library`: 0 = unlimited. `arguments`: loader arguments as short text. `longest_input`: maximum tokens (0
    = any). `home`: the program's folder. `named`: cache names of relative paths in `files`.
    """

    key: str
    name: str
    loader: bytes = b""
    objects: tuple[ObjectRef, ...] = ()
    needs: Needs = Needs()
    slots: int = 1
    preload: tuple[str, ...] = ()
    awareness: Awareness = Awareness.FULL
    calls_per_library: int = 0
    arguments: str = ""
    limits: LibraryLimits = NO_LIMITS
    longest_input: int = 0
    home: ProgramFolder | None = None
    named: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """Name and arguments for users, for example `llm-7f3a('models/small')`, or `no context`."""
        return f"{self.name}{self.arguments}" if self.loader or self.key != BARE.key else "no context"

    def __repr__(self) -> str:
        needs, limits, size = self.needs, self.limits, sum(part.size_bytes for part in self.objects)
        parts = {
            f"{needs.devices} devices": needs.devices != 1,
            f"on {' or '.join(needs.kinds)}": needs.kinds,
            f"memory {show_bytes(needs.memory_bytes)}": needs.memory_bytes,
            f"device memory {show_bytes(needs.device_memory_bytes)}": needs.device_memory_bytes,
            f"{len(self.objects)} object{'s' * (len(self.objects) != 1)} of {show_bytes(size)}": self.objects,
            f"inputs up to {self.longest_input:,} tokens": self.longest_input,
            f"awareness {self.awareness.value}": self.awareness is not Awareness.FULL,
            f"{limits.least} to {limits.most or 'any number of'} libraries": limits.least or limits.most,
            f"kept {show_seconds(limits.keep_alive_s or 0)} when idle": limits.keep_alive_s is not None,
        }
        return f"<{', '.join([f'recipe {self.title}', *(part for part, is_shown in parts.items() if is_shown)])}>"


BARE = Recipe(key="bare", name="bare", needs=Needs())


Size = str | Literal[0] | None


class RecipeOptions(TypedDict, total=False):
    """Options of `stoker.context` that ready-made model recipes also accept."""

    memory: Size
    device_memory: Size
    kinds: Iterable[str]
    load_limit: str | float
    awareness: str | Awareness
    calls_per_library: int
    min_libraries: int
    max_libraries: int | None
    keep_alive: str | float | None


class ContextOptions:
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
            devices=_check_count("devices", devices, least=1),
            device_memory_bytes=_parse_size("device_memory", device_memory),
            memory_bytes=_parse_size("memory", memory),
            disk_bytes=_parse_size("disk", disk),
            kinds=_parse_names("kinds", kinds),
            load_limit_s=_parse_time("load_limit", load_limit),
        )
        self.slots = 0 if slots == "auto" else _check_count("slots", slots, least=1, auto=', or "auto"')
        self.calls_per_library = _check_count("calls_per_library", calls_per_library, least=0, most=MOST_NUMBER)
        self.files = _parse_names("files", files, what="paths, or names of the loader's parameters")
        self.preload = None if preload is None else _parse_names("preload", preload)
        levels = [level.value for level in Awareness]
        if awareness not in (*Awareness, *levels):
            raise _option_error("awareness", awareness, f"write one of {', '.join(levels)}")
        self.awareness = Awareness(awareness)
        if self.awareness is not Awareness.FULL:  # such a context serves one call, then it is unloaded
            self.calls_per_library = self.calls_per_library or 1
        self.limits = _parse_limits(min_libraries, max_libraries, keep_alive)


_OPTION_NAMES = tuple(inspect.signature(ContextOptions).parameters)


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTION_NAMES:
            hint = suggest_similar_name(name, _OPTION_NAMES, otherwise=f"the options are {', '.join(_OPTION_NAMES)}")
            raise RecipeError(f"@context has no option {name!r}; {hint}", option=name)
    return options


def _parse_size(option: str, value: Size) -> int:
    if value is None:
        return 0
    try:
        size = parse_bytes(value)
    except (ValueError, OverflowError) as error:
        raise _option_error(option, value, str(error)) from None
    if size > MOST_BYTES:
        raise _option_error(option, value, "no machine has that much")
    return size


def _parse_time(option: str, value: str | float, *, none_left: str = "it leaves no time to load") -> float:
    try:
        seconds = parse_seconds(value)
    except (ValueError, OverflowError) as error:
        raise _option_error(option, value, str(error)) from None
    if none_left and seconds <= 0:
        raise _option_error(option, value, none_left)
    if seconds > LONGEST_S:
        raise _option_error(option, value, 'write a shorter time, as in "30 min"')
    return seconds


def _parse_limits(least: Any, most: Any, keep_alive: Any) -> LibraryLimits:
    _check_count("min_libraries", least, least=0)
    if most is not None and _check_count("max_libraries", most, least=1) < least:
        raise _option_error("min_libraries", least, f"it is more than max_libraries = {most}")
    kept_s = None if keep_alive is None else _parse_time("keep_alive", keep_alive, none_left="")
    return LibraryLimits(least, most or 0, kept_s)


def _check_count(option: str, value: Any, *, least: int, most: int = MOST_AT_ONCE, auto: str = "") -> int:
    if type(value) is not int or value < least:
        raise _option_error(option, value, f"write a whole number, {least} or more{auto}")
    if value > most:
        raise _option_error(option, value, f"it must be at most {most:,}")
    return value


def _parse_names(option: str, value: Any, *, what: str = "names") -> tuple[str, ...]:
    several = isinstance(value, Iterable) and not isinstance(value, str | os.PathLike)
    names = [os.fspath(each) if isinstance(each, os.PathLike) else each for each in (value if several else [value])]
    if not all(isinstance(name, str) and name for name in names):
        raise _option_error(option, value, f"write {what}, as in {option}=['...', '...']")
    return tuple(names)


def _option_error(option: str, value: Any, problem: str) -> RecipeError:
    shown = repr(value) if len(repr(value)) < 80 else repr(value)[:77] + "..."
    return RecipeError(f"@context({option}={shown}): {problem}", option=option)
