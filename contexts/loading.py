"""From a recipe to its live context: what a library process does first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import CoroutineType
from typing import Any

from stoker.contexts.code_payloads import loads_code
from stoker.contexts.recipe import Recipe
from stoker.errors import RecipeError
from stoker.units import MOST_AT_ONCE


class ObjectPath:
    """Stands in a recipe's pickled arguments for the path of an object, until a pilot knows where that lies.

    `as_path` says that the loader gave a `pathlib.Path` and wants one back.
    """

    __slots__ = ("as_path", "name")

    def __init__(self, name: str, *, as_path: bool = False) -> None:
        self.name = name
        self.as_path = as_path

    def __reduce__(self) -> tuple[Any, ...]:
        return _object_path, (self.name, self.as_path)

    def __repr__(self) -> str:
        return f"ObjectPath({self.name!r})"


def _object_path(name: str, as_path: bool) -> ObjectPath:
    return ObjectPath(name, as_path=as_path)


def load_context(recipe: Recipe, objects: Mapping[str, str]) -> Any:
    """The context of a recipe: its loader's return value, or None for the bare recipe.

    `objects` maps each object's cache name to the local path where it lies. Raises RecipeError when one is missing;
    what the loader raises comes as it is.
    """
    if not recipe.loader:
        return None
    (function, args, kwargs, *_), modules = loads_code(recipe.loader)
    modules.enter_for_good()
    args = tuple(_substitute(value, objects, recipe) for value in args)
    kwargs = {name: _substitute(value, objects, recipe) for name, value in kwargs.items()}
    context = function(*args, **kwargs)
    if isinstance(context, CoroutineType):
        context.close()
        raise RecipeError(f"the loader of {recipe.name} returned a coroutine: run it there, with asyncio.run(...)")
    return context


def slots_of(recipe: Recipe, context: Any, *, device_memory_bytes: int) -> int:
    """How many calls a library runs at once: the recipe's number, or with `slots="auto"` what the loaded context says.

    A context says it by a method `slots(device_memory_bytes)`: what the library may hold of each of its devices, 0 if
    the recipe does not declare it. Without that method it is 1. It is asked once: a reservation that is resized later
    does not change the number. Raises RecipeError for an answer that is no whole number from 1 on.
    """
    if recipe.slots:
        return recipe.slots
    method = getattr(context, "slots", None)
    if not callable(method):
        return 1
    answer = method(device_memory_bytes)
    if type(answer) is not int or not 1 <= answer <= MOST_AT_ONCE:
        raise RecipeError(
            f"slots({device_memory_bytes}) of the context {recipe.name} returned {answer!r}: it has to be a whole"
            f" number of calls that the library runs at once, 1 to {MOST_AT_ONCE:,}"
        )
    return answer


def is_loaded(context: Any) -> bool:  # noqa: ARG001
    """True wherever it runs: a call of this function has its context loaded (`Session.warm`)."""
    return True


def _substitute(value: Any, objects: Mapping[str, str], recipe: Recipe) -> Any:
    """Arguments, and containers of them, with local paths in place of ObjectPath."""
    if isinstance(value, ObjectPath):
        if value.name not in objects:
            raise RecipeError(
                f"the context {recipe.name} needs the object {value.name}, which is not on this pilot;"
                f" {len(objects)} others are",
                object=value.name,
            )
        return Path(objects[value.name]) if value.as_path else str(objects[value.name])
    if type(value) in (list, tuple):
        return type(value)(_substitute(item, objects, recipe) for item in value)
    if type(value) is dict:
        return {key: _substitute(item, objects, recipe) for key, item in value.items()}
    return value
