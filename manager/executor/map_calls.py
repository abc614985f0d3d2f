"""What the calls of a `stoker.map` consist of: the arguments of each, and the submission that they share."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from parsl.app.python import PythonApp

from stoker.contexts import payloads
from stoker.contexts.digest import digest_of_item
from stoker.errors import RecipeError
from stoker.manager.executor.apps import StokerApp
from stoker.manager.executor.executor import StokerExecutor
from stoker.manager.executor.options import Wants
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.packing import pack_arguments
from stoker.manager.executor.prepared import travels_with
from stoker.protocol.calls import Payload

_PLAIN = Wants()


class MapContent(NamedTuple):
    """What the results of a map depend on, besides its items: digests of the function's code and of the arguments that
    it is given ahead, and the context that it wants."""

    code: str
    arguments: str
    context: str
    context_key: str


class MapCalls:
    """The calls of one `map` of a function or app. `batch_size`: items of a call that takes a batch. With `streams`
    they give their results in pieces."""

    def __init__(
        self,
        executor: StokerExecutor,
        function: Callable[..., Any],
        *,
        batch_size: int | None = None,
        streams: bool = False,
    ) -> None:
        wants = _PLAIN
        self._before: tuple[Any, ...] = ()
        self._with: dict[str, Any] = {}
        app = app_in(function)
        if app is not None:
            wants = app.specification.wants if isinstance(app, StokerApp) else _PLAIN
            if isinstance(function, functools.partial):  # a method, or an app with arguments given ahead
                self._before, self._with = function.args, function.keywords
            function = app.func
        wants = wants.streaming(streams)
        self._wants = wants
        self.features = wants.features
        self._large = executor.link.large
        self._prepared = executor.preparer.function(function)
        self.name: str = self._prepared.name
        self._deadline_s = wants.deadline_s
        self._batch_size = batch_size
        self._function = function
        self._make_submission = functools.partial(self._prepared.submission, function, place=executor.call_place)
        self._brought: set[str] = set()
        """Modules of the user that the item packed last refers to."""
        self._renew_submission()

    def pack(self, item: Any) -> Payload:
        """Pickle an item as arguments of a call; large ones go to a file. Raises SerializationError."""
        return self.pack_call((item,), {})

    def pack_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Payload:
        """Pickle the arguments of a call; large ones go to a file. Raises SerializationError."""
        packed = pack_arguments(
            (*self._before, *args),
            {**self._with, **kwargs} if kwargs else self._with,
            name=self.name,
            large=self._large,
            by_name=self._by_name,
            brought=self._brought,
        )
        if self._brought:  # these modules travel with the function, which is sent once
            self._prepared.bring_along(self._brought)
            self._brought.clear()
            self._renew_submission()
        return packed

    def content(self) -> MapContent:
        """What the results depend on, besides the items."""
        wants, ahead = self._wants, (self._before, self._with)
        try:
            arguments = digest_of_item(ahead) if self._before or self._with else ""
        except RecipeError:
            arguments = digest_of_item(payloads.dumps(ahead))
        keys = [
            recipe.key for recipe in (wants.recipe, *wants.variants, *(wants.family.recipes if wants.family else ()))
        ]
        code = self._prepared.content(self._function, self._submission.function)
        return MapContent(code, arguments, wants.recipe.name, " ".join(dict.fromkeys(keys)))

    @property
    def context_key(self) -> str:
        """The key of the context that the calls want; of a family the longest one's."""
        return self._wants.recipe.key

    @property
    def is_family(self) -> bool:
        """Whether each call has the context that its input wants (`submission_of`)."""
        return self._wants.family is not None

    def submission(self) -> Submission:
        """What calls that are submitted now have in common. Their deadline counts from now, not from the first call."""
        return self._due(self._submission)

    def submission_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Submission:
        """What a call with these arguments has in common with others. Raises InputTooLongError."""
        if not self.is_family:
            return self.submission()
        wants = self._wants.chosen((*self._before, *args), {**self._with, **kwargs})
        made = self._of_length.get(id(wants))
        if made is None:
            function = self._submission.function
            blob = function if travels_with(function, wants.recipe) == self._by_name else None  # pickled once a map
            made = self._of_length[id(wants)] = self._batched(self._make_submission(wants, blob=blob))
        return self._due(made)

    def _due(self, made: Submission) -> Submission:
        return dataclasses.replace(made, due_at=time.monotonic() + self._deadline_s) if self._deadline_s else made

    def _batched(self, made: Submission) -> Submission:
        if not self._batch_size:
            return made
        return dataclasses.replace(made, options=msgspec.structs.replace(made.options, batch=self._batch_size))

    def _renew_submission(self) -> None:
        self._submission = self._batched(self._make_submission(self._wants))
        self._of_length: dict[int, Submission] = {}
        """Of a family, by the identity of what calls of one length want."""
        self._by_name = travels_with(self._submission.function, self._submission.recipe)


def app_in(function: Callable[..., Any]) -> PythonApp | None:
    """The app that was given to `map`: itself, or with arguments given ahead."""
    inner = function.func if isinstance(function, functools.partial) else function
    return inner if isinstance(inner, PythonApp) else None
