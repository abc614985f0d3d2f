"""`@stoker.app`: a Parsl `python_app` that passes a loaded context to its function as the first argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast, overload

from parsl.app.errors import wrap_error
from parsl.app.python import PythonApp, timeout
from parsl.data_provider.files import File
from parsl.dataflow.dflow import DataFlowKernel

from stoker.config_errors import suggest_similar_name
from stoker.contexts.encoder import Family
from stoker.contexts.factory import RecipeFactory, as_recipe
from stoker.contexts.function_code import describe_generator, is_generator_function
from stoker.contexts.payloads import pickle_if_small_builtin
from stoker.contexts.recipe import Recipe
from stoker.errors import ConfigError, SerializationError
from stoker.manager.executor.executor import check_executor_labels, stoker_executors
from stoker.manager.executor.futures import AppCallFuture
from stoker.manager.executor.kernel import enable_immediate_launch, get_loaded_kernel
from stoker.manager.executor.options import (
    CallRequirements,
    SpecificationError,
    check_boolean_option,
    check_integer_option,
    parse_call_specification,
)
from stoker.manager.executor.pieces import PieceInbox
from stoker.manager.executor.prepared import (
    PACKED,
    SPECIFICATION,
    AppSpecification,
    PreparedFunction,
    function_name,
    modules_pickled_with,
    without_error_wrapper,
)
from stoker.protocol.calls import Features
from stoker.units import show_seconds

_PARSL_KEYWORDS = frozenset({"inputs", "outputs", "stdout", "stderr", "walltime", SPECIFICATION})


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
    ttft: str | float | None = None,
    tpot: str | float | None = None,
    gang: int | tuple[int, int] = 1,
    features: Features | Mapping[str, Any] | None = None,
    variants: Sequence[Recipe] = (),
    stream: bool | None = None,
    cache: bool = False,
    ignore_for_cache: Sequence[str] | None = None,
    executors: Sequence[str] | None = None,
) -> Callable[[Callable[..., Any]], StokerApp]: ...
def app(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function into an app: each call returns a future, and runs where its context is loaded.

    Futures as arguments, `inputs`, `outputs`, `stdout` and a `walltime` parameter work as in Parsl's `python_app`.

    Args:
        function: The function, if `@app` is used without parentheses.
        context: A recipe: the function receives the loaded context as its first argument, which callers omit. With a
            family (`stoker.family`), each call uses the shortest sufficient runtime.
        batch_size: Default number of items that `stoker.map` puts into one call.
        timeout: Maximum run time of a call (`"10 min"`).
        priority: Calls with a higher number run first.
        deadline: Time from submission until a call should end. Within a priority, the earliest deadline runs first,
            and calls without a deadline run last.
        late: `"run"` runs a call that cannot meet its deadline, with a warning, after calls that can meet their
            deadlines; `"drop"` drops the call.
        latency, ttft, tpot: Maximum time to the result (`"150 ms"`), to the first token, and per further token, for a
            policy that honours these limits.
        gang: Devices that run a call together: a number or `(smallest, largest)`; see `stoker.gang()`.
        features: Facts about a call that policies use: `{"items": 200}`.
        variants: Other contexts that can run the calls, best first, for a policy that honours variants.
        stream: Send each yielded piece immediately (docs/streams.md). The default is True for a function with `yield`;
            a function that returns an iterator needs True. With False the result is a list.
        cache: Use Parsl's memoization; the context is part of the memoization key.
        ignore_for_cache: Parameters that are not part of the memoization key.
        executors: Labels of Parsl executors. The default is every loaded StokerExecutor.

    Returns:
        The app, or a decorator if options are given.

    Raises:
        ConfigError: An option or its value is not allowed. RecipeError: The context is not a recipe.
    """
    if isinstance(function, Recipe | RecipeFactory):
        what = getattr(function, "__name__", None) or "..."
        raise ConfigError(f"@stoker.app accepts options only by name: @stoker.app(context={what})")
    if function is not None and not callable(function):
        raise ConfigError(
            f"@stoker.app decorates a function, and accepts options only by name; it received {function!r:.80}"
        )
    if wrong := next((name for name in options if name not in OPTIONS), ""):
        hint = suggest_similar_name(wrong, OPTIONS, otherwise=_HINTS.get(wrong, f"it takes {', '.join(OPTIONS)}"))
        raise ConfigError(f"@stoker.app has no option {wrong}; {hint}", key=wrong)
    options = {**OPTIONS, **options}
    if options["batch_size"] is not None:
        check_integer_option("batch_size", options["batch_size"], least=1)
    check_boolean_option("cache", options["cache"])
    if parse_name_list("executors", options["executors"]) == []:
        raise ConfigError("executors: the list is empty, so no executor could run a call; omit this option to use all")
    if parse_name_list("ignore_for_cache", options["ignore_for_cache"]) and not options["cache"]:
        raise ConfigError("ignore_for_cache has no effect without cache=True: add cache=True, or omit ignore_for_cache")
    requirements = _parse_app_options(options)

    def decorate(function: Callable[..., Any]) -> StokerApp:
        without_error_wrapper = function.__func__ if isinstance(function, staticmethod) else function
        streams = options["stream"]
        if streams is None and callable(function):
            streams = is_generator_function(without_error_wrapper)
        if streams and requirements.options.gang[1] > 1:
            raise ConfigError(
                f"{function_name(function)} yields its result in pieces, which calls of a gang cannot do: omit gang, or"
                " write stream=False for a result that is the list of yielded values",
                key="gang",
            )
        return StokerApp(function, requirements.with_streaming(bool(streams)), options)

    return decorate if function is None else decorate(function)


OPTIONS: dict[str, Any] = {
    "context": None, "batch_size": None, "timeout": None, "priority": 0, "deadline": None, "late": "run",
    "latency": None, "ttft": None, "tpot": None, "gang": 1, "features": None, "variants": (), "stream": None,
    "cache": False, "ignore_for_cache": None, "executors": None,
}  # fmt: skip
"""The options of `app` and their defaults."""


class StokerApp(PythonApp):  # type: ignore[misc]  # parsl is untyped
    """The callable that `@stoker.app` returns. Made by `app`. `options`: the arguments of `@stoker.app`."""

    func: Any

    def __init__(
        self, function: Callable[..., Any], requirements: CallRequirements, options: Mapping[str, Any]
    ) -> None:
        if not callable(function):
            raise ConfigError(f"@stoker.app decorates a function; it received {function!r}")
        if isinstance(function, PythonApp):
            raise ConfigError(f"{function.__name__} is already an app; use one decorator")
        ignored = parse_name_list("ignore_for_cache", options.get("ignore_for_cache"))
        check_app_function(function, takes_context=requirements.takes_context, ignored=ignored or ())
        super().__init__(function, cache=options.get("cache", False), ignore_for_cache=ignored)
        self.__name__ = self.func.__name__ = getattr(function, "__name__", function_name(function))
        self.__doc__ = function.__doc__
        self.__module__ = getattr(function, "__module__", None) or "builtins"
        self.__wrapped__ = function
        self.options = dict(options)
        self.batch_size: int | None = options.get("batch_size")
        self.labels = parse_name_list("executors", options.get("executors"))
        """Labels of the executors that may run the app; None for all executors."""
        self.specification = AppSpecification(requirements)
        self.kwargs[SPECIFICATION] = self.specification
        self._is_method = False
        self._is_static = isinstance(function, staticmethod)
        self._kernel: DataFlowKernel | None = None
        self._may_pickle_at_call = not self.cache and not _PARSL_KEYWORDS.intersection(
            self.kwargs.keys() - {SPECIFICATION}
        )
        self._walltime_function: tuple[Any, Callable[..., Any]] | None = None
        self._last_specification: AppSpecification | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> AppCallFuture:
        """Return the future of a new call. Raises SessionError if no site is loaded."""
        kernel = get_loaded_kernel(self.__name__)
        if self._kernel is not kernel:
            if self.labels is not None:
                check_executor_labels(kernel, self.labels, name=self.__name__)
            self.executors = self.labels or [each.label for each in stoker_executors(kernel, self.__name__)]
            self._kernel = kernel
            enable_immediate_launch(kernel)
        requirements = self.specification.requirements
        if requirements.knows_input_length(args, kwargs):  # otherwise the executor chooses the context later
            requirements = requirements.with_context_for(args, kwargs)
        inbox = PieceInbox(keeps_all=True) if requirements.options.stream else None
        if requirements is not self.specification.requirements:
            kwargs = {SPECIFICATION: AppSpecification(requirements), **kwargs}
        if kernel.monitoring is None:  # with monitoring, Parsl wraps the function, so pickle it later
            function = self._function_with_walltime(kwargs.get("walltime", self.kwargs.get("walltime")))
            prepared = kernel.executors[self.executors[0]].preparer.prepare_function(function)
            kwargs.pop(SPECIFICATION, None)
            specification = self._call_specification(function, prepared, requirements)
            packed = self._pickle_arguments_now(args, kwargs, specification, prepared)
            if packed is not None:
                args, kwargs = (), {PACKED: packed}
            if inbox is not None:
                specification = specification.copy_with(inbox=inbox)
            kwargs = {SPECIFICATION: specification, **kwargs}
        return AppCallFuture.of(super().__call__(*args, **kwargs), inbox=inbox)

    def with_options(self, **options: Any) -> StokerApp:
        """Return a new app of the same function with changed options: `verify.with_options(context=llm(path))(claim)`.

        Args:
            **options: The `@stoker.app` options to change.

        Raises:
            ConfigError: An option name is unknown, or the app is a method.
        """
        if self._is_method:
            raise ConfigError(f"{self.__name__} is a method; pass the options to @app, or make the method a function")
        merged = {**self.options, **options}
        if not options.keys() <= _PER_CALL_OPTIONS:
            return app(**merged)(self.__wrapped__)
        again: StokerApp = object.__new__(type(self))
        again.__dict__.update(self.__dict__)
        again.specification = AppSpecification(
            _parse_app_options(merged).with_streaming(self.specification.requirements.options.stream)
        )
        again.kwargs = {**self.kwargs, SPECIFICATION: again.specification}
        again.options = merged
        again._last_specification = None
        return again

    def _function_with_walltime(self, walltime: Any) -> Callable[..., Any]:
        if walltime is not None and self.specification.requirements.options.stream:
            raise ConfigError(
                f"{self.__name__} yields its result in pieces, and Parsl's walltime would be over before the first one:"
                " write @stoker.app(timeout=...)",
                key="walltime",
            )
        if walltime is None:
            return cast(Callable[..., Any], self.func)
        if self._walltime_function is None or self._walltime_function[0] != walltime:
            self._walltime_function = (walltime, timeout(self.func, walltime))
        return self._walltime_function[1]

    def _call_specification(
        self, function: Callable[..., Any], prepared: PreparedFunction, requirements: CallRequirements
    ) -> AppSpecification:
        """Return a call's options with its function, pickled now because the program may change its variables later."""
        try:
            blob = prepared.current_blob(function, requirements)
        except SerializationError:  # the call's future raises this error
            return AppSpecification(requirements)
        last = self._last_specification
        if last is None or last.function is not blob or last.requirements is not requirements:
            self._last_specification = last = AppSpecification(requirements, function=blob, pickled_from=function)
            if self.cache:
                last.content_digest = prepared.content_digest(self.func, blob)
        return last

    def _pickle_arguments_now(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], specification: AppSpecification, prepared: PreparedFunction
    ) -> bytes | None:
        """Pickle the arguments at submission, because the program may change them later. Return None if Parsl's kernel
        caches results or must read the arguments (futures, files, Parsl's keywords)."""
        if not self._may_pickle_at_call or not _PARSL_KEYWORDS.isdisjoint(kwargs):
            return None
        plain = pickle_if_small_builtin((args, kwargs))
        if plain is not None:
            return plain
        if any(isinstance(value, Future | File) for value in (*args, *kwargs.values())):
            return None
        function, recipe = specification.function, specification.requirements.recipe
        try:
            by_name = frozenset() if function is None else modules_pickled_with(function, recipe)
            return prepared.pickle_arguments(args, kwargs, by_name=by_name)
        except SerializationError:  # the call's future raises this error
            return None

    @property
    def function(self) -> Callable[..., Any]:
        """The undecorated function."""
        return without_error_wrapper(self.func)

    def __set_name__(self, owner: type, name: str) -> None:
        """Let a method take the context before `self`, because a library passes the context first."""
        if self.specification.requirements.takes_context and not self._is_method and not self._is_static:
            self._is_method, method = True, self.function

            @functools.wraps(method)
            def call_method(context: Any, instance: Any, *args: Any, **kwargs: Any) -> Any:
                return method(instance, context, *args, **kwargs)

            self.func = wrap_error(call_method)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None or self._is_static else functools.partial(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the app without this program's executors, so that functions that use the app can be pickled."""
        return StokerApp, (self.__wrapped__, self.specification.requirements, self.options)

    def __repr__(self) -> str:
        requirements = self.specification.requirements
        facts = [f"context {requirements.recipe.name}" if requirements.takes_context else "no context"]
        if requirements.options.limit_s:
            facts.append(f"timeout {show_seconds(requirements.options.limit_s)}")
        if requirements.options.priority:
            facts.append(f"priority {requirements.options.priority}")
        return f"<app {self.__name__}: {', '.join(facts)}>"


def app_executor_labels(app: PythonApp | None) -> list[str] | None:
    if isinstance(app, StokerApp):
        return app.labels
    return app.executors if app is not None and isinstance(app.executors, list) else None


# ---- checks of options and functions


_HINTS = {
    "retries": "Parsl retries calls: stoker.load(retries=2)",
    "walltime": "the option is named timeout; each call also accepts Parsl's walltime=",
    "memory": "the context declares the devices that a call needs: @stoker.context(memory=...)",
    "device_memory": "the context declares the devices that a call needs: @stoker.context(device_memory=...)",
    "devices": "the context declares the devices that a call needs: @stoker.context(devices=...)",
    "gpus": "the site file asks for GPUs: [provider] gpus",
}
_PER_CALL_OPTIONS = frozenset({"features", "priority", "timeout", "deadline", "latency", "ttft", "tpot"})
"""Options of single calls. An app from `with_options` that changes only these shares all other state with its app."""
_APP_OPTION_NAMES = {
    name: name.removesuffix("_s") for name in ("timeout_s", "deadline_s", "latency_s", "ttft_s", "tpot_s")
}


def _parse_app_options(options: Mapping[str, Any]) -> CallRequirements:
    """Parse the options that are sent with calls."""
    context, stream = options["context"], options["stream"]
    recipe = context if context is None or isinstance(context, Family) else as_recipe(context)
    given = {name: options[name] for name in ("variants", "late", "gang", "features", "priority")}
    given |= {name: options[here] for name, here in _APP_OPTION_NAMES.items()}
    try:
        streams = False if stream is None else stream
        return parse_call_specification({**given, "context": recipe, "stream": streams}, takes_context=True)
    except SpecificationError as error:
        key = str(error.facts.get("key", ""))
        name = _APP_OPTION_NAMES.get(key, key)
        raise SpecificationError(f"{name}{str(error).removeprefix(key)}", key=name, invalid_keys={name}) from None


def parse_name_list(option: str, value: Any) -> list[str] | None:
    if value is None or (option == "executors" and value == "all"):
        return None
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{option}: {value!r:.80} is not a list of names")
    return names


def check_app_function(function: Callable[..., Any], *, takes_context: bool, ignored: Iterable[str]) -> None:
    name, yields = function_name(function), describe_generator(function)
    if yields and not is_generator_function(function):
        raise ConfigError(f"{name} is {yields}, which cannot be the result of a call: return a value, or yield pieces")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(
            f"Python finds no signature of {name}, and an app needs one; decorate a function that calls it:"
            f" @stoker.app above def apply(*args): return {name}(*args)"
        ) from None
    kinds = [parameter.kind for parameter in parameters.values()]
    short = getattr(function, "__name__", repr(function))
    if takes_context and (not kinds or kinds[0] in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)):
        raise ConfigError(
            f"{short} has a context but no parameter for the context: the first parameter receives the context, as in"
            f" def {short}(model, ...)"
        )
    unknown = next((name for name in ignored if name not in parameters), None)
    if unknown is not None and inspect.Parameter.VAR_KEYWORD not in kinds:
        has = ", ".join(parameters) or "none"
        what = getattr(function, "__name__", "the function")
        raise ConfigError(f"{what}: ignore_for_cache: {unknown!r} is not one of its parameters ({has})", key=unknown)
