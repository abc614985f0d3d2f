"""`@context`: turn a loader into a factory of recipes.

@context(memory="4 GB")              nothing is loaded here or on the next line
def llm(path): ...
recipe = llm("models/small")         a value; its key is the digest of the loader, its arguments and its needs
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, overload

from stoker.contexts import payload_layout
from stoker.contexts.digest import digest_of
from stoker.contexts.folders import program_folder
from stoker.contexts.function_code import CapturedObjects, SourceLines, describe_generator, is_async, unwrap_partial
from stoker.contexts.loading import ObjectPath, find_modules_used_by
from stoker.contexts.objects import make_object_ref
from stoker.contexts.payloads import dumps_code
from stoker.contexts.recipe import Awareness, ContextOptions, Needs, ObjectRef, Recipe, Size, checked_options
from stoker.errors import RecipeError, SerializationError

Loader = Callable[..., Any]
_MAX_LOCAL_RECIPES = 256  # a limit, because each recipe keeps its loader's captured objects in memory
_MAX_SHOWN_CHARACTERS = 300
_local_recipes: OrderedDict[str, _LocalRecipe] = OrderedDict()


class _LocalRecipe(NamedTuple):
    loader: weakref.ref[Any]
    arguments: dict[str, Any] | None
    captured: CapturedObjects


def find_local_loader(key: str) -> tuple[Loader, dict[str, Any]] | None:
    known = _local_recipes.get(key)
    if known is None or known.arguments is None or (loader := known.loader()) is None:
        return None
    return loader, known.arguments


def find_rebound_name_in_loader(key: str) -> str:
    """Return the first name in a recipe's loader that the program has rebound after it made the recipe, or ""."""
    known = _local_recipes.get(key)
    return known.captured.find_rebound_name() if known is not None and known.loader() is not None else ""


class RecipeFactory:
    """A loader decorated with `@context`. Calling the factory returns a Recipe. Made by `context`."""

    def __init__(self, loader: Loader, options: Mapping[str, Any], name: str = "") -> None:
        if not callable(loader):
            raise RecipeError(f"@context decorates a function; it got {loader!r}")
        _check_loader_returns_value(loader)
        self.loader = loader
        self._given_options = dict(options)
        self._options = ContextOptions(**options)
        self._name = name
        functools.update_wrapper(self, loader)

    def __call__(self, *args: Any, **kwargs: Any) -> Recipe:
        return make_recipe(self.loader, args, kwargs, self._options, name=self._name)

    def with_options(self, **options: Any) -> RecipeFactory:
        """Return a factory with the same loader and changed options.

        Args:
            **options: Options of `@context` to change.
        """
        return RecipeFactory(self.loader, {**self._given_options, **checked_options(options)}, name=self._name)

    def named(self, name: str) -> RecipeFactory:
        """Return a factory whose recipes have another name and the same key.

        Args:
            name: The name that `stoker status` shows.
        """
        return RecipeFactory(self.loader, self._given_options, name=name)

    def load_here(self, *args: Any, **kwargs: Any) -> Any:
        """Return the context, loaded in this process for a test.

        Args:
            *args, **kwargs: Arguments of the loader.
        """
        return self.loader(*args, **kwargs)

    def __repr__(self) -> str:
        signature = _signature_or_none(self.loader) or "(...)"
        return f"<context {_loader_name(self.loader)}{signature}; call it to make a recipe>"

    def __reduce__(self) -> tuple[Any, ...]:
        return RecipeFactory, (self.loader, self._given_options, self._name)

    def __getattr__(self, name: str) -> Any:
        if name in Recipe.__struct_fields__:
            loader = _loader_name(self.__dict__["loader"])
            raise AttributeError(f"{loader} is not a recipe yet, so it has no {name}; call it first: {loader}(...)")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


@overload
def context(loader: Loader, /) -> RecipeFactory: ...
@overload
def context(
    loader: None = None,
    /,
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
) -> Callable[[Loader], RecipeFactory]: ...
def context(loader: Loader | None = None, /, **options: Any) -> Any:
    """Turn a loader into a factory of recipes. Use the decorator as `@context` or with options.

    Args:
        loader: The function that loads the context, for a decorator without options.
        memory: Limit of host memory with unit, `"4 GB"`. Stoker measures undeclared needs.
        device_memory: Limit of memory on each device.
        disk: Scratch space that a pilot needs to load the context.
        devices: Number of devices of a library.
        kinds: Suitable device kinds, best first (`"cpu"`, `"NVIDIA A10"`). Empty: all kinds.
        slots: Concurrent calls in one library. `"auto"`: result of the context's method `slots(device_memory_bytes)`,
            or 1 without this method.
        load_limit: Time limit of the loader.
        files: Paths, or names of the loader's parameters that are paths. Stoker sends the files to the pilot, and the
            loader receives local paths.
        preload: Modules that a pilot imports before it forks libraries. Default: modules that the loader uses.
        awareness: State that is kept after a call: `full`, `disk` or `none`.
        calls_per_library: Calls after which a library ends; 1 if `awareness` is not `full`.
        min_libraries: Libraries that stay loaded when idle. The key excludes this option, `max_libraries` and
            `keep_alive`; some policies refuse these options (docs/options.md).
        max_libraries: Maximum number of loaded libraries.
        keep_alive: Idle time after which a library is unloaded.

    Returns:
        The factory. With options, a decorator that returns a factory.

    Raises:
        RecipeError: An option is invalid (UnitError for a size or a time).
    """
    if loader is None:
        ContextOptions(**checked_options(options))
        return functools.partial(_decorate_with_options, options=options)
    if not callable(loader) or isinstance(loader, Recipe):
        raise RecipeError(f"@context takes its options by name, as in @context(memory='4 GB'); it got {loader!r}")
    return RecipeFactory(loader, checked_options(options))


def _decorate_with_options(loader: Any, *, options: dict[str, Any]) -> RecipeFactory:
    if isinstance(loader, RecipeFactory):
        return loader.with_options(**options)
    return RecipeFactory(loader, options)


def recipe_of(
    loader: Loader, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **needs: Any
) -> Recipe:
    """Return the recipe of an undecorated loader (`parsl_spec` in Pervasive Context Management).

    Args:
        loader: The function that loads the context.
        args: Arguments of the loader.
        kwargs: Keyword arguments of the loader.
        **needs: Options of `@context`.

    Raises:
        RecipeError: An argument or an option is invalid.
    """
    if not isinstance(loader, RecipeFactory):
        if not callable(loader):
            raise RecipeError(f"a context's loader must be a function; it got {loader!r}")
        loader = RecipeFactory(loader, {})
    return (loader.with_options(**needs) if needs else loader)(*args, **(kwargs or {}))


def as_recipe(value: Any) -> Recipe:
    """Return the recipe of a value given as `context=`.

    Args:
        value: The value.

    Raises:
        RecipeError: The value is not a recipe.
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, RecipeFactory):
        name = _loader_name(value.loader)
        raise RecipeError(f"context={name} is a context that has not been called; write context={name}(...)")
    if getattr(value, "func", None) is _decorate_with_options:
        raise RecipeError("context=context(...) has no loader; decorate a loader with it")
    if callable(value):
        name = _loader_name(value)
        raise RecipeError(f"context={name} is a plain function; put @context above it and write context={name}(...)")
    raise RecipeError(f"context= needs a recipe, such as llm(path) for a loader llm with @context; it got {value!r}")


def make_recipe(
    loader: Loader, args: tuple[Any, ...], kwargs: dict[str, Any], options: ContextOptions, *, name: str = ""
) -> Recipe:
    shown = name
    name, signature, plain = _loader_name(loader), _signature_or_none(loader), None
    if signature is not None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise RecipeError(f"{name}{signature} does not accept these arguments: {error}", loader=name) from None
        bound.apply_defaults()
        plain = {
            parameter: value
            for parameter, value in bound.arguments.items()
            if value is None
            or (isinstance(value, str | int | float | bool) and len(str(value)) <= _MAX_SHOWN_CHARACTERS)
        }
    for value in (*args, *kwargs.values()):  # refuse recipes: the loader would receive a recipe, not the loaded context
        if isinstance(value, Recipe | RecipeFactory):
            why = f"its argument {value!r} is a context; write one loader that loads both"
            raise RecipeError(f"cannot make a recipe of {name}: {why}", loader=name)
    names = list(signature.parameters) if signature is not None else []
    arguments = payload_layout.show_arguments(args, kwargs, names=names) if args or kwargs else ""
    args, kwargs, objects, named = _replace_file_arguments(loader, args, kwargs, options.files, name=name)
    home = program_folder()
    # Stoker's ready-made loaders read no files by relative paths, so the working folder does not matter.
    is_ready_made = str(getattr(loader, "__module__", "")).partition(".")[0] == "stoker"
    parts = [
        "recipe",
        loader,
        [_as_digestible_value(value) for value in args],
        {key: _as_digestible_value(kwargs[key]) for key in sorted(kwargs)},
        [ref.name for ref in objects],
        [[field, getattr(options.needs, field)] for field in Needs.__struct_fields__],
        [options.slots, options.awareness.value, options.calls_per_library],
        *([home.path] if home is not None and not is_ready_made else ()),
    ]
    try:
        key = digest_of(*parts, names=("", "", "argument", "argument"))[:32]
        packed = dumps_code((loader, args, kwargs, SourceLines()), what="recipe")
    except (RecipeError, SerializationError) as error:
        raise RecipeError(f"cannot make a recipe of {name}: {error}", loader=name) from error
    with suppress(TypeError):  # do not keep a loader that forbids weak references
        _local_recipes[key] = _LocalRecipe(weakref.ref(loader), plain, CapturedObjects(loader))
        _local_recipes.move_to_end(key)
        if len(_local_recipes) > _MAX_LOCAL_RECIPES:
            _local_recipes.popitem(last=False)
    return Recipe(
        key=key, name=f"{shown or name}-{key[:4]}", loader=packed, objects=objects, needs=options.needs,
        slots=options.slots, preload=find_modules_used_by(loader) if options.preload is None else options.preload,
        awareness=options.awareness, calls_per_library=options.calls_per_library, arguments=arguments,
        limits=options.limits, home=home, named=named,
    )  # fmt: skip


def _check_loader_returns_value(loader: Loader) -> None:
    name, what, advice = _loader_name(loader), describe_generator(loader), "write `return` instead"
    if not what and is_async(loader):
        what, advice = "an async function", "write `def`, and call asyncio.run(...) instead of `await`"
    if what:
        told = "a loader is a plain function that returns the context, which stays until its library ends"
        raise RecipeError(f"{name} is {what}; {told}: {advice}", loader=name)


def _replace_file_arguments(
    loader: Loader, args: tuple[Any, ...], kwargs: dict[str, Any], files: tuple[str, ...], *, name: str
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[ObjectRef, ...], tuple[tuple[str, str], ...]]:
    if not files:
        return args, kwargs, (), ()
    bound = inspect.signature(loader).bind(*args, **kwargs)
    bound.apply_defaults()
    parameters, objects, by_path, named = bound.signature.parameters, dict[str, ObjectRef](), dict[str, ObjectRef](), []
    for parameter in parameters:
        if parameter in files:
            place = f"{name}({parameter}=...)"
            bound.arguments[parameter] = _convert_paths_to_objects(bound.arguments[parameter], objects, place=place)
    for path in sorted(set(files) - parameters.keys()):
        if not os.path.exists(path):
            why = (
                f"is neither a parameter of {name} ({', '.join(parameters) or 'it has none'}) nor a file or folder here"
            )
            raise RecipeError(f"files={path!r} {why}", loader=name)
        ref = make_object_ref(path)
        by_path[os.path.abspath(path)] = objects[ref.name] = ref
        plain = os.path.normpath(path)
        if not os.path.isabs(plain) and not plain.startswith(".."):
            named.append((plain, ref.name))
    new_args = tuple(_as_object_path(value, by_path) for value in bound.args)
    new_kwargs = {key: _as_object_path(value, by_path) for key, value in bound.kwargs.items()}
    return new_args, new_kwargs, tuple(objects[key] for key in sorted(objects)), tuple(named)


def _convert_paths_to_objects(value: Any, objects: dict[str, ObjectRef], *, place: str) -> Any:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return type(value)(_convert_paths_to_objects(item, objects, place=place) for item in value)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise RecipeError(f"{place} is listed in files, so it must be a path; it is {value!r:.80}")
    ref = make_object_ref(os.fspath(value))
    objects[ref.name] = ref
    return ObjectPath(ref.name, as_path=isinstance(value, Path))


def _as_object_path(value: Any, by_path: dict[str, ObjectRef]) -> Any:
    ref = by_path.get(os.path.abspath(value)) if by_path and isinstance(value, str | Path) else None
    return ObjectPath(ref.name, as_path=isinstance(value, Path)) if ref is not None else value


def _as_digestible_value(value: Any) -> Any:
    if isinstance(value, ObjectPath):
        return ["object", value.name, value.as_path]
    if type(value) in (list, tuple):
        return type(value)(_as_digestible_value(item) for item in value)
    return value


def _loader_name(loader: Any) -> str:
    plain = unwrap_partial(loader)
    name = str(getattr(plain, "__name__", type(plain).__name__))
    return "lambda" if name == "<lambda>" else name.strip("_") or name


def _signature_or_none(loader: Loader) -> inspect.Signature | None:
    try:
        return inspect.signature(loader)
    except (TypeError, ValueError):  # some builtins have no signature
        return None
