"""`@stoker.app`: a Parsl `python_app` whose function gets a hot context as its first argument."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast, overload

from parsl.app.errors import wrap_error
from parsl.app.python import PythonApp, timeout
from parsl.data_provider.files import File
from parsl.dataflow.dflow import DataFlowKernel

from stoker.contexts.encoder import Family
from stoker.contexts.factory import RecipeFactory, as_recipe
from stoker.contexts.function_code import gives_pieces, how_it_yields
from stoker.contexts.payloads import dumps_arguments, plain_bytes
from stoker.contexts.recipe import Recipe
from stoker.errors import ConfigError, SerializationError
from stoker.manager.executor.executor import check_labels, stoker_executors
from stoker.manager.executor.futures import AppCallFuture
from stoker.manager.executor.kernel import launch_at_once, loaded_kernel
from stoker.manager.executor.options import SpecificationError, Wants, check_count, check_truth, read_wants
from stoker.manager.executor.packing import bare, name_of
from stoker.manager.executor.pieces import PieceInbox
from stoker.manager.executor.prepared import (
    PACKED,
    SPECIFICATION,
    AppWants,
    PreparedFunction,
    for_one_call,
    travels_with,
)
from stoker.protocol.calls import Features
from stoker.units import show_seconds

_PARSLS = frozenset({"inputs", "outputs", "stdout", "stderr", "walltime", SPECIFICATION})
"""Keywords of a call that Parsl's kernel acts on."""


@overload
def app(function: Callable[..., Any], /) -> StokerApp: ...
@overload
def app(
    function: None = None,
    /,
    *,
    context: Recipe | Family | None = None,
    batch_size: int | None = None,
    timeout: str | float | None = None,
    priority: int = 0,
    deadline: str | float | None = None,
    late: str = "run",
    latency: str | float | None = None,
    gang: int | tuple[int, int] = 1,
    features: Features | Mapping[str, Any] | None = None,
    variants: Sequence[Recipe] = (),
    stream: bool | None = None,
    cache: bool = False,
    ignore_for_cache: Sequence[str] | None = None,
    executors: Sequence[str] | None = None,
) -> Callable[[Callable[..., Any]], StokerApp]: ...
def app(
    function: Callable[..., Any] | None = None,
    /,
    *,
    context: Recipe | Family | None = None,
    batch_size: int | None = None,
    timeout: str | float | None = None,
    priority: int = 0,
    deadline: str | float | None = None,
    late: str = "run",
    latency: str | float | None = None,
    gang: int | tuple[int, int] = 1,
    features: Features | Mapping[str, Any] | None = None,
    variants: Sequence[Recipe] = (),
    stream: bool | None = None,
    cache: bool = False,
    ignore_for_cache: Sequence[str] | None = None,
    executors: Sequence[str] | None = None,
    **unknown: Any,
) -> Any:
    """Make a function into an app: calling it returns a future at once, and it runs where its context is hot.

    Used bare (`@app`), or with options:

    - `context`: a recipe. The function gets the loaded context as its first argument; callers leave it out. Or a family
      (`stoker.family`): each call gets the runtime that its input's length wants, or a longer one.
    - `batch_size`: how many items `stoker.map` puts into one call, unless it is told otherwise.
    - `timeout`: ends a call that runs longer (`"10 min"`).
    - `deadline`: when a call should be done, from its submission. Within a priority the nearest comes first, and calls
      without one come after those with one. `late="drop"`: a call that cannot be in time any more (its deadline has
      passed, or no call of its function took as little as is left) is dropped; else you are told, and it runs after
      those that can be in time.
    - `latency`: how long a call may take, from its submission (`"150 ms"`). It needs a policy that honours it.
    - `gang`: how many devices run a call together, a number or `(smallest, largest)`: see `stoker.gang()`.
    - `features`: what policies may know of a call, `{"items": 200}`.
    - `priority`: higher runs first. `variants`: other contexts that can serve its calls, best first. It needs a policy
      that honours it, as `arlo` does; what a policy does not honour is refused (docs/options.md).
    - `stream`: whether the pieces that the function yields travel as they come (docs/streams.md). By default they do if
      it contains `yield`; `True` also for a function that returns an iterator. `False`: the result is a list of them.
    - `cache`, `ignore_for_cache`: Parsl's memoization; the context is part of what is remembered.
    - `executors`: labels of Parsl executors (default: every StokerExecutor that is loaded).

    Everything that Parsl's `python_app` knows works: futures as arguments, `inputs`, `outputs`, `stdout`; `walltime`,
    if the function has a parameter of that name.
    Raises ConfigError or RecipeError for an option that cannot be meant.
    """
    asked = {name: value for name, value in locals().items() if name not in ("function", "unknown")}
    if isinstance(function, Recipe | RecipeFactory):
        what = getattr(function, "__name__", None) or "..."
        raise ConfigError(f"@stoker.app takes its options by name: @stoker.app(context={what})")
    if function is not None and not callable(function):
        raise ConfigError(f"@stoker.app decorates a function, and takes its options by name; it got {function!r:.80}")
    if unknown:
        options = [each for each in inspect.signature(app).parameters if each not in ("function", "unknown")]
        raise unknown_option(next(iter(unknown)), options=options)
    if batch_size is not None:
        check_count("batch_size", batch_size, least=1)
    check_truth("cache", cache)
    ignore_for_cache = names_in("ignore_for_cache", ignore_for_cache)
    executors = names_in("executors", None if executors == "all" else executors)
    if executors == []:
        raise ConfigError("executors: an empty list: no executor could run a call; leave it out for all that there are")
    if ignore_for_cache and not cache:
        raise ConfigError("ignore_for_cache has no effect without cache=True: write that, too, or leave it out")
    recipe = context if context is None or isinstance(context, Family) else as_recipe(context)
    given: dict[str, Any] = {"context": recipe, "timeout_s": timeout, "deadline_s": deadline, "variants": variants}
    given |= {"late": late, "gang": gang, "features": features, "latency_s": latency}
    try:
        streams = False if stream is None else stream
        wants = read_wants({**given, "priority": priority, "stream": streams}, takes_context=True)
    except SpecificationError as error:
        raise named_as_here(error) from None

    def decorate(function: Callable[..., Any]) -> StokerApp:
        own = wants
        if callable(function) and check_stream(function, stream=stream, gang=wants.options.gang):
            own = wants.streaming(True)
        made = StokerApp(
            function,
            specification=AppWants(own),
            batch_size=batch_size,
            cache=cache,
            ignore_for_cache=ignore_for_cache,
            executors=executors,
        )
        made.options = asked
        return made

    return decorate if function is None else decorate(function)


class StokerApp(PythonApp):  # type: ignore[misc]  # parsl is untyped
    """What `@stoker.app(...)` makes of a function."""

    func: Any

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        specification: AppWants,
        batch_size: int | None,
        cache: bool,
        ignore_for_cache: Sequence[str] | None,
        executors: Sequence[str] | None,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"@stoker.app decorates a function; it got {function!r}")
        if isinstance(function, PythonApp):
            raise ConfigError(f"{function.__name__} is an app already; use one decorator")
        check_has_result(function)
        if specification.wants.takes_context:
            check_takes_context(function)
        check_ignored(function, ignore_for_cache or ())
        super().__init__(function, cache=cache, ignore_for_cache=ignore_for_cache)
        self.__name__ = self.func.__name__ = getattr(function, "__name__", name_of(function))
        self.specification = specification
        self.batch_size = batch_size
        self.kwargs[SPECIFICATION] = specification
        self._labels = list(executors) if executors is not None else None
        self._is_method = False
        self._is_static = isinstance(function, staticmethod)
        self._found: tuple[DataFlowKernel, list[str]] | None = None
        """The kernel that is loaded, and the labels of the executors there."""
        self._has_own_packing = not cache and not _PARSLS.intersection(self.kwargs.keys() - {SPECIFICATION})
        self.__doc__ = function.__doc__
        self.__module__ = getattr(function, "__module__", None) or "builtins"
        self.__wrapped__ = function
        self._timed: tuple[Any, Callable[..., Any]] | None = None
        """The function with the last walltime around it."""
        self._last: AppWants | None = None
        """The specification of the last call."""
        self.options: dict[str, Any] = {}
        """What `@app` was given."""

    def __call__(self, *args: Any, **kwargs: Any) -> AppCallFuture:
        """Submit a call; its future, which can be cancelled. Raises SessionError before a site is loaded."""
        kernel = loaded_kernel(self.__name__)
        if self._found is None or self._found[0] is not kernel:
            if self._labels is not None:
                check_labels(kernel, self._labels, name=self.__name__)
            self.executors = self._labels or [each.label for each in stoker_executors(kernel, self.__name__)]
            self._found = (kernel, self.executors)
            launch_at_once(kernel)
        wants = self._wants_of(args, kwargs)
        inbox = PieceInbox(keeps_all=True) if wants.options.stream else None
        if wants is not self.specification.wants:
            kwargs = {SPECIFICATION: AppWants(wants), **kwargs}
        if kernel.monitoring is None:  # Parsl's monitoring wraps functions and adds arguments
            function = self._with_walltime(kwargs.get("walltime", self.kwargs.get("walltime")))
            prepared = kernel.executors[self._found[1][0]].preparer.function(function)
            kwargs.pop(SPECIFICATION, None)
            specification = self._specification_now(function, prepared, wants)
            packed = self._packed(args, kwargs, specification, prepared)
            if packed is not None:
                args, kwargs = (), {PACKED: packed}
            if specification.wants.options.stream:
                specification = for_one_call(specification)
                inbox = specification.inbox
            kwargs = {SPECIFICATION: specification, **kwargs}
        return AppCallFuture.of(super().__call__(*args, **kwargs), inbox=inbox)

    def _wants_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wants:
        """What a call wants: of a family the context for its input. Where that is a future, the call finds its context
        when the future is done."""
        wants = self.specification.wants
        return wants.chosen(args, kwargs) if wants.can_choose(args, kwargs) else wants

    def with_options(self, **options: Any) -> StokerApp:
        """The same function under other options; takes what `@app` takes, and keeps what is not named.

        A program that learns its context at run time names it here: `verify.with_options(context=llm(path))(claim)`.
        Raises ConfigError for an option that `@app` does not have, and for a method.
        """
        if self._is_method:
            raise ConfigError(f"{self.__name__} is a method; give its options to @app, or make it a function")
        again: StokerApp = app(**{**self.options, **options})(self.__wrapped__)
        return again

    def _with_walltime(self, walltime: Any) -> Callable[..., Any]:
        """The function as Parsl's kernel hands it to an executor: with a walltime it is wrapped."""
        if walltime is not None and self.specification.wants.options.stream:
            raise ConfigError(
                f"{self.__name__} gives its result in pieces, and Parsl's walltime would be over before the first one:"
                " write @stoker.app(timeout=...)",
                key="walltime",
            )
        if walltime is None:
            return cast(Callable[..., Any], self.func)
        if self._timed is None or self._timed[0] != walltime:
            self._timed = (walltime, timeout(self.func, walltime))
        return self._timed[1]

    def _specification_now(self, function: Callable[..., Any], prepared: PreparedFunction, wants: Wants) -> AppWants:
        """With the function as it is now: a program may bind what it captures anew before Parsl's kernel has sent the
        call."""
        try:
            blob = prepared.blob(function, wants)
        except SerializationError:  # the call's future says so
            return AppWants(wants)
        last = self._last
        if last is None or last.function is not blob or last.wants is not wants:
            self._last = last = AppWants(wants, function=blob, made_of=function)
            if self.cache:
                last.content = prepared.content(self.func, blob)
        return last

    def _packed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], specification: AppWants, prepared: PreparedFunction
    ) -> bytes | None:
        """The arguments as they are now: a program may change a list or an array before Parsl's kernel has sent it.
        None where the kernel has to see them: futures, files, Parsl's own keywords, a cache of results."""
        if not self._has_own_packing or not _PARSLS.isdisjoint(kwargs):
            return None
        plain = plain_bytes((args, kwargs))
        if plain is not None:
            return plain
        if any(isinstance(value, Future | File) for value in (*args, *kwargs.values())):
            return None
        try:
            function, recipe = specification.function, specification.wants.recipe
            by_name = frozenset() if function is None else travels_with(function, recipe)
            brought = set[str]()
            packed = dumps_arguments((args, kwargs), by_name=by_name, brought=brought)
        except SerializationError:  # the call's future says so
            return None
        prepared.bring_along(brought)
        return packed

    @property
    def labels(self) -> list[str] | None:
        """The labels of the executors that may run it; None: every StokerExecutor that is loaded."""
        return self._labels

    @property
    def function(self) -> Callable[..., Any]:
        """The function as it was written."""
        return bare(self.func)

    def __set_name__(self, owner: type, name: str) -> None:
        """In a class: a method reads `self, context, ...`, and a library calls with the context first."""
        if self.specification.wants.takes_context and not self._is_method and not self._is_static:
            self._is_method = True
            self.func = wrap_error(_context_first(self.function))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the instance travels with the call."""
        return self if instance is None or self._is_static else functools.partial(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        """An app travels in functions that name it, without what it knows of this program's executors."""
        given = (self.batch_size, self.cache, self.ignore_for_cache, self._labels, self.options)
        return _again, (self.__wrapped__, self.specification.wants, *given)

    def __repr__(self) -> str:
        wants = self.specification.wants
        facts = [f"context {wants.recipe.name}" if wants.takes_context else "no context"]
        if wants.options.limit_s:
            facts.append(f"timeout {show_seconds(wants.options.limit_s)}")
        if wants.options.priority:
            facts.append(f"priority {wants.options.priority}")
        return f"<app {self.__name__}: {', '.join(facts)}>"


def _again(function: Callable[..., Any], wants: Wants, *given: Any) -> StokerApp:
    batch_size, cache, ignore_for_cache, executors, options = given
    made = StokerApp(
        function,
        specification=AppWants(wants),
        batch_size=batch_size,
        cache=cache,
        ignore_for_cache=ignore_for_cache,
        executors=executors,
    )
    made.options = options
    return made


def _context_first(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(context: Any, instance: Any, *args: Any, **kwargs: Any) -> Any:
        return method(instance, context, *args, **kwargs)

    return call


def labels_of(app: PythonApp | None) -> list[str] | None:
    """The labels of the executors that an app names; None if it names none."""
    if isinstance(app, StokerApp):
        return app.labels
    named = app.executors if app is not None else None
    return named if isinstance(named, list) else None


# ---- checks of options and functions


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
