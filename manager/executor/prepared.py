"""Prepare a function for submission: its name, its bytes, and a `Submission` for each specification.

This module refuses values that the protocol cannot encode.
"""

from __future__ import annotations

import copy
import inspect
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from parsl.dataflow.memoization import id_for_memo

from stoker.contexts.digest import digest_of
from stoker.contexts.factory import first_rebound_name
from stoker.contexts.payloads import carried_module_names
from stoker.contexts.recipe import Recipe
from stoker.errors import ConfigError, ProtocolError, RecipeError, SerializationError
from stoker.manager.executor.options import ANYWHERE, CallPlace, Wants, parse_call_specification, read_parsl_spec
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.packing import FunctionCache, bare, logger, name_of, own
from stoker.manager.executor.pieces import PieceInbox
from stoker.protocol import to_manager, wire
from stoker.protocol.bounds import MOST_DEFINED_BYTES, describe_invalid_message
from stoker.protocol.calls import CallSpec, Features
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.to_pilot import FunctionBlob
from stoker.units import show_bytes

# ---- checks


_decode = wire.from_client_decoder()


def check_submission(submission: Submission, features: Features | None, *, name: str, known: set[str]) -> None:
    """Raise ConfigError or SerializationError if calls of this submission cannot be sent. `known`: keys of recipes that
    have passed the check."""
    _check_pickle_size(len(submission.function.blob), f"{name} and the names that it uses", what="function")
    recipes = (submission.recipe, *submission.variants)
    messages: list[msgspec.Struct] = [
        *(to_manager.DefineRecipe(recipe) for recipe in recipes if recipe.key not in known),
        to_manager.DefineFunction(submission.function.key, submission.function.name, b"", submission.function.place),
        submission.message([CallSpec(CallId(0), b"", features)], now=submission.due_at or 0.0),
    ]
    for message in messages:
        try:
            data = wire.encode([message])
            wrong = describe_invalid_message(_decode(data).messages[0])
        except (ProtocolError, UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
            wrong = _invalid_field(message) or str(error).partition(" - at `$")[0]  # users do not know msgspec's path
        if wrong:
            raise ConfigError(f"{name} cannot be called with these arguments: {wrong}")
        if isinstance(message, to_manager.DefineRecipe):
            _check_pickle_size(
                len(data), f"context {message.recipe.name}, its loader and its arguments", what="context"
            )
    known.update(recipe.key for recipe in recipes)


def _check_pickle_size(size: int, whose: str, *, what: str) -> None:
    if size > MOST_DEFINED_BYTES:
        raise SerializationError(
            f"{whose} take {show_bytes(size)}, and at most {show_bytes(MOST_DEFINED_BYTES)} are sent with a {what}:"
            " pass large values as arguments of the call, or read them in a context's loader from a file (its"
            " files=...)",
            what=what,
        )


def _invalid_field(message: msgspec.Struct) -> str:
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        try:
            msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(value)), field.type)
        except (UnicodeEncodeError, OverflowError, TypeError, ValueError):
            parts = value if isinstance(value, list | tuple) else (value,)
            deeper = (_invalid_field(part) for part in parts if isinstance(part, msgspec.Struct))
            return next(filter(None, deeper), f"{field.name} is {value!r:.80}")
    return ""


# ---- prepared functions


SPECIFICATION = "parsl_resource_specification"
PACKED = "stoker_packed_arguments"
"""The keyword that passes the bytes of a call's arguments through Parsl's kernel."""
PARSL_SPEC = "parsl_spec"
_RECIPES_KEPT = 32

Check = Callable[[Wants], None]
LeaveSource = Callable[[str, Callable[..., Any], Recipe], None]


class AppWants(dict[str, Any]):
    """The parsed specification of a Stoker app, as Parsl passes it to the executor.

    `due_at`: the deadline of a call's first try. `function`: the bytes of `made_of` at the time of the call; if None,
    the function is pickled when the call is sent. `content`: the function's digest, if results are cached.
    """

    def __init__(
        self,
        wants: Wants,
        *,
        due_at: float | None = None,
        function: FunctionBlob | None = None,
        made_of: Callable[..., Any] | None = None,
        inbox: PieceInbox | None = None,
        content: str = "",
    ) -> None:
        super().__init__()
        self.wants = wants
        self.due_at = due_at
        self.function = function
        self.made_of = made_of
        self.inbox = inbox
        self.content = content

    def again(self, **changes: Any) -> AppWants:
        copied = copy.copy(self)
        vars(copied).update(changes)
        return copied


class TriedWants(dict[str, Any]):
    def __init__(self, specification: Mapping[str, Any], *, due_at: float) -> None:
        super().__init__(specification)
        self.due_at = due_at


@id_for_memo.register(AppWants)  # type: ignore[untyped-decorator]  # parsl is untyped
def _id_for_memo(specification: AppWants, output_ref: bool = False) -> bytes:  # noqa: ARG001
    return f"{specification.wants.recipe.key} {specification.content}".encode()


class PreparedFunction:
    def __init__(self, function: Callable[..., Any], preparer: Preparer) -> None:
        self.name = name_of(own(function))
        self._preparer = preparer
        self._submissions: dict[tuple[int, int], tuple[Wants, CallPlace, Submission]] = {}
        self._spec_place = _parsl_spec_position(bare(function))
        self._told: set[str] = set()
        self._sendable: set[str] = set()
        self._content = ("", "")
        self._also = frozenset[str]()

    def blob(self, function: Callable[..., Any], wants: Wants) -> FunctionBlob:
        takes = wants.takes_context
        by_name = carried_module_names(wants.recipe.loader) if takes else frozenset[str]()
        return self._preparer.cache.blob(bare(function), takes_context=takes, by_name=by_name, also=self._also)

    def add_modules_to_pickle(self, modules: set[str]) -> None:
        if modules:
            self._also |= modules

    def content(self, function: Callable[..., Any], blob: FunctionBlob) -> str:
        """Return the digest of a function's content, which is equal in all programs. Without a digest, return the key
        of the function's bytes."""
        if self._content[0] != blob.key:
            try:
                self._content = (blob.key, digest_of(own(function)))
            except RecipeError:
                self._content = (blob.key, blob.key)
        return self._content[1]

    def submission(
        self, function: Callable[..., Any], wants: Wants, *, place: CallPlace = ANYWHERE, due_at: float | None = None,
        blob: FunctionBlob | None = None,
    ) -> Submission:  # fmt: skip
        """Return the submission for these options. Calls with the same Wants object share a submission and its
        messages.

        `due_at`: the deadline of the call's first try. `blob`: the function's bytes at the time of the call. Raises
        ConfigError.
        """
        self._warn_of_changed_context(wants.recipe)
        blob = self.blob(function, wants) if blob is None else blob
        known = self._submissions.get((id(wants), id(place)))
        if known is not None and known[0] is wants and known[1] is place and known[2].function is blob:
            return known[2]
        self._preparer.check(wants)
        if due_at is None:
            due_at = time.monotonic() + wants.deadline_s
        submission = Submission(
            function=blob,
            recipe=wants.recipe,
            options=wants.options_with_call_place(place),
            variants=wants.variants,
            due_at=due_at if wants.deadline_s else None,
        )
        check_submission(submission, wants.features, name=self.name, known=self._sendable)
        self._preparer.leave_source(blob.key, own(function), wants.recipe)
        if not wants.deadline_s:
            if len(self._submissions) > 256:
                self._submissions.clear()
            self._submissions[id(wants), id(place)] = (wants, place, submission)
        return submission

    def _warn_of_changed_context(self, recipe: Recipe) -> None:
        if recipe.key in self._told or not recipe.loader:
            return
        name = first_rebound_name(recipe.key)
        if name:
            self._told.add(recipe.key)
            logger.warning(
                "context %s was made before %s changed, and is loaded with the old value; to load it with the new"
                " value, run the lines again that call its loader and that decorate %s",
                recipe.name,
                name,
                self.name,
            )

    def parsl_spec(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if PARSL_SPEC in kwargs:
            return kwargs[PARSL_SPEC]
        place = self._spec_place
        return args[place] if place is not None and place < len(args) else None

    def replace_parsl_spec(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], stand_in: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if PARSL_SPEC in kwargs:
            return args, {**kwargs, PARSL_SPEC: stand_in}
        place = self._spec_place or 0
        return (*args[:place], stand_in, *args[place + 1 :]), kwargs


class Preparer:
    """Maps function objects to prepared functions. `check` raises ConfigError for options that the engine cannot
    honour."""

    def __init__(
        self,
        check: Check = lambda _wants: None,
        *,
        on_replaced: Callable[[FunctionKey, FunctionKey], None] = lambda _key, _by: None,
        leave_source: LeaveSource = lambda _key, _function, _recipe: None,
    ) -> None:
        self.check = check
        self.leave_source = leave_source
        self._functions: weakref.WeakKeyDictionary[Any, PreparedFunction] = weakref.WeakKeyDictionary()
        self.cache = FunctionCache(on_replaced=on_replaced)
        self._plain = Wants()
        self._paper: list[tuple[list[Any], Wants]] = []

    def function(self, function: Callable[..., Any]) -> PreparedFunction:
        try:
            known = self._functions.get(function)
        except TypeError:  # the function is unhashable or has no weak references
            known = None
        if known is None:
            known = PreparedFunction(function, self)
            with suppress(TypeError):
                self._functions[function] = known
        return known

    def wants(self, specification: Mapping[str, Any] | None) -> Wants:
        if isinstance(specification, AppWants):
            return specification.wants
        return parse_call_specification(specification) if specification else self._plain

    def wants_from_parsl_spec(self, spec: Any) -> Wants:
        context = spec.get("context") if isinstance(spec, Mapping) else None
        if not isinstance(context, list | tuple):
            return Wants(recipe=read_parsl_spec(spec))
        for known, wants in self._paper:
            if _equals_context(known, context):
                return wants
        wants = Wants(recipe=read_parsl_spec(spec))
        del self._paper[_RECIPES_KEPT:]
        self._paper.insert(0, (_copy(context), wants))
        return wants


def _copy(context: Any) -> list[Any]:
    return [type(part)(part) if type(part) in (list, tuple, dict) else part for part in context]


def _equals_context(known: list[Any], context: Any) -> bool:
    try:
        return bool(known == _copy(context))
    except Exception:  # a comparison of arrays raises; a new recipe has the same digest
        return False


def _parsl_spec_position(function: Callable[..., Any]) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index(PARSL_SPEC) if PARSL_SPEC in names else None
