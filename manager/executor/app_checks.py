"""Checks of what `@stoker.app` is given: its options and its function."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stoker.contexts.function_code import gives_pieces, how_it_yields
from stoker.errors import ConfigError
from stoker.manager.executor.packing import name_of
from stoker.manager.executor.wants import SpecificationError

_ELSEWHERE = {
    "retries": "Parsl tries calls again: stoker.load(retries=2)",
    "walltime": "ends of calls are told with timeout; a call itself takes Parsl's walltime=",
    "memory": "what a call needs of a device, its context says: @stoker.context(memory=...)",
    "device_memory": "what a call needs of a device, its context says: @stoker.context(device_memory=...)",
    "devices": "what a call needs of devices, its context says: @stoker.context(devices=...)",
    "gpus": "the site file asks for GPUs: [provider] gpus",
}
"""Options that people expect of `@app`, and what replaces them."""
_HERE = {"timeout_s": "timeout", "deadline_s": "deadline"}
"""Options of a specification that have another name in `@app`."""


def names_in(option: str, value: Any) -> list[str] | None:
    """The names that an option was given: a list, or one text. Raises ConfigError for anything else."""
    if value is None:
        return None
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{option}: {value!r:.80} is not a list of names")
    return names


def unknown_option(name: str, *, options: Sequence[str]) -> ConfigError:
    """The error for an option that `@app` does not have. `options`: those that it has."""
    near = difflib.get_close_matches(name, options, n=1)
    elsewhere = _ELSEWHERE.get(name, f"it takes {', '.join(options)}")
    return ConfigError(
        f"@stoker.app has no option {name}; {f'did you mean {near[0]}?' if near else elsewhere}", key=name
    )


def named_as_here(error: SpecificationError) -> SpecificationError:
    """The same error, with the key as `@app` calls it."""
    key = str(error.facts.get("key", ""))
    name = _HERE.get(key, key)
    return SpecificationError(f"{name}{str(error).removeprefix(key)}", key=name, invalid_keys={name})


def check_ignored(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise ConfigError for a name of `ignore_for_cache` that is no parameter of the function."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            what, has = getattr(function, "__name__", "the function"), ", ".join(parameters) or "none"
            raise ConfigError(f"{what}: ignore_for_cache: {name!r} is not one of its parameters ({has})", key=name)


def check_has_result(function: Callable[..., Any]) -> None:
    """Raise ConfigError for a context manager, and for a function that has no signature."""
    name, yields = name_of(function), how_it_yields(function)
    if yields and not gives_pieces(function):
        raise ConfigError(f"{name} is {yields}, and a call has a result: return a value, or yield pieces of it")
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(
            f"Python knows no signature of {name}, which an app needs; decorate a function that calls it:"
            f" @stoker.app above def apply(*args): return {name}(*args)"
        ) from None


def check_stream(function: Callable[..., Any], *, stream: bool | None, gang: tuple[int, int]) -> bool:
    """Whether calls of an app give their results in pieces: as it says, else if its function yields. Raises ConfigError
    for a gang's calls, which cannot."""
    bare = function.__func__ if isinstance(function, staticmethod) else function
    streams = gives_pieces(bare) if stream is None else stream
    if streams and gang[1] > 1:
        raise ConfigError(
            f"{name_of(function)} gives its result in pieces, which calls of a gang cannot: leave gang out, or write"
            " stream=False for a result that is the list of what it yields",
            key="gang",
        )
    return streams


def check_takes_context(function: Callable[..., Any]) -> None:
    """Raise ConfigError for a function with a context that has no parameter for it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(
            f"{name} has a context but no parameter for it: the first one gets it, as in def {name}(model, ...)"
        )
