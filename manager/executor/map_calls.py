"""The calls of a `stoker.map` or `stoker.stream`: their executor, arguments and shared submission."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec
from parsl.app.python import PythonApp
from parsl.dataflow.dflow import DataFlowKernel

from stoker.errors import ConfigError
from stoker.manager.executor.apps import StokerApp, app_executor_labels
from stoker.manager.executor.executor import StokerExecutor, check_executor_labels, stoker_executors
from stoker.manager.executor.kept_file import KeptHeader, digest_of_kept_item
from stoker.manager.executor.kernel import get_loaded_kernel
from stoker.manager.executor.options import CallRequirements
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.prepared import function_name, inline_or_store_arguments, modules_pickled_with
from stoker.protocol.calls import Payload
from stoker.protocol.session import PYTHON

_NO_REQUIREMENTS = CallRequirements()


def unwrap_parsl_app(function: Callable[..., Any]) -> PythonApp | None:
    """Return the app itself or the app inside a `functools.partial`; None for a plain function."""
    inner = function.func if isinstance(function, functools.partial) else function
    return inner if isinstance(inner, PythonApp) else None


def find_kernel_and_executor(
    function: Callable[..., Any], asked: str, *, inside: str
) -> tuple[DataFlowKernel, StokerExecutor]:
    """Return Parsl's kernel, and the first executor that the app may use. `inside`: advice for code inside a call."""
    app, name = unwrap_parsl_app(function), function_name(function)
    if app is not None and app.cache:
        raise ConfigError(
            f"{asked}: {name} has cache=True, which has no effect here (calls bypass Parsl's kernel): call the app"
            " for each item, or pass an app without cache",
            key="cache",
        )
    given = function.keywords if isinstance(function, functools.partial) else {}
    if app is not None and given.get("walltime", app.kwargs.get("walltime")) is not None:
        raise ConfigError(
            f"{asked}: {name} has Parsl's walltime, which has no effect here: write @stoker.app(timeout=...)",
            key="walltime",
        )
    kernel = get_loaded_kernel(f"{asked}({name}, ...)", inside=inside)
    ours = {executor.label: executor for executor in stoker_executors(kernel, asked)}
    labels = app_executor_labels(app)
    if labels is None:
        return kernel, next(iter(ours.values()))
    here = [label for label in labels if label in ours]
    if not here:
        check_executor_labels(kernel, labels, name=f"{asked}: {name}")
    return kernel, ours[here[0]]


class MapCalls:
    def __init__(
        self, executor: StokerExecutor, function: Callable[..., Any], *, batch_size: int | None = None,
        streams: bool = False,
    ) -> None:  # fmt: skip
        self._bound_args: tuple[Any, ...] = ()
        self._bound_kwargs: dict[str, Any] = {}
        app = unwrap_parsl_app(function)
        requirements = app.specification.requirements if isinstance(app, StokerApp) else _NO_REQUIREMENTS
        if app is not None:
            if isinstance(function, functools.partial):  # a method or a partial of an app
                self._bound_args, self._bound_kwargs = function.args, function.keywords
            function = app.func
        self._requirements = requirements = requirements.with_streaming(streams)
        self.features = requirements.features
        self.context_key = requirements.recipe.key
        self.is_family = requirements.family is not None
        """True if the context of each call depends on its input."""
        self._large = executor.link.large_arguments
        self._prepared = executor.preparer.prepare_function(function)
        self.name: str = self._prepared.name
        self.batch_size = batch_size
        self._function = function
        self._make_submission = functools.partial(self._prepared.create_submission, function, place=executor.call_place)
        self._renew_submission()

    def pack_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Payload:
        prepared, kwargs = self._prepared, {**self._bound_kwargs, **kwargs} if kwargs else self._bound_kwargs
        also = prepared.modules_to_pickle
        packed = prepared.pickle_arguments((*self._bound_args, *args), kwargs, by_name=self._by_name)
        if prepared.modules_to_pickle is not also:  # send new modules once, with the function
            self._renew_submission()
        return inline_or_store_arguments(packed, name=self.name, large=self._large)

    def create_kept_header(self) -> KeptHeader:
        """Return everything that determines the map's results, except the items."""
        requirements = self._requirements
        recipes = (
            requirements.recipe,
            *requirements.variants,
            *(requirements.family.recipes if requirements.family else ()),
        )
        keys = dict.fromkeys(recipe.key for recipe in recipes)
        return KeptHeader(
            function=self.name, code=self._prepared.content_digest(self._function, self._submission.function),
            arguments=digest_of_kept_item((self._bound_args, self._bound_kwargs))
            if self._bound_args or self._bound_kwargs
            else "",
            context=requirements.recipe.name, context_key=" ".join(keys), batch_size=self.batch_size, python=PYTHON,
        )  # fmt: skip

    def current_submission(self) -> Submission:
        """Return the submission for calls sent now; a deadline counts from now."""
        return self._with_deadline(self._submission)

    def create_submission_for_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Submission:
        if not self.is_family:
            return self.current_submission()
        requirements = self._requirements.with_context_for((*self._bound_args, *args), {**self._bound_kwargs, **kwargs})
        made = self._submissions_by_context.get(id(requirements))
        if made is None:
            function = self._submission.function  # reuse the bytes that were pickled for this map, if possible
            blob = function if modules_pickled_with(function, requirements.recipe) == self._by_name else None
            made = self._submissions_by_context[id(requirements)] = self._with_batch_size(
                self._make_submission(requirements, blob=blob)
            )
        return self._with_deadline(made)

    def _with_deadline(self, made: Submission) -> Submission:
        limit_s = self._requirements.deadline_s
        return dataclasses.replace(made, due_at=time.monotonic() + limit_s) if limit_s else made

    def _with_batch_size(self, made: Submission) -> Submission:
        if not self.batch_size:
            return made
        return dataclasses.replace(made, options=msgspec.structs.replace(made.options, batch=self.batch_size))

    def _renew_submission(self) -> None:
        self._submission = self._with_batch_size(self._make_submission(self._requirements))
        self._submissions_by_context: dict[int, Submission] = {}
        self._by_name = modules_pickled_with(self._submission.function, self._submission.recipe)
