"""Prepare a function for submission: its name, its bytes, and a `Submission` for each specification.

A `PreparedFunction` is kept with the function object, weakly: when the program drops the function, this goes too. A
message is encoded long after its call was submitted, so values that the protocol cannot carry are refused here, where
the call is made.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from parsl.dataflow.memoization import id_for_memo

from stoker.contexts.digest import digest_of
from stoker.contexts.factory import changed_since_made
from stoker.contexts.payloads import names_carried
from stoker.contexts.recipe import Recipe
from stoker.errors import ConfigError, ProtocolError, RecipeError, SerializationError
from stoker.manager.executor.options import ANYWHERE, CallPlace, Wants, read_parsl_spec, read_wants
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.packing import FunctionCache, bare, logger, name_of, own
from stoker.manager.executor.pieces import PieceInbox
from stoker.protocol import to_manager, wire
from stoker.protocol.bounds import MOST_DEFINED_BYTES, wrong_with
from stoker.protocol.calls import CallSpec, Features
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.to_pilot import FunctionBlob
from stoker.units import show_bytes

# ---- sendable


_decode = wire.from_client()


def check_submission(submission: Submission, features: Features | None, *, name: str, known: set[str]) -> None:
    """Raise ConfigError or SerializationError if calls of this submission cannot be sent; the error names the reason.

    `name` is the function's; `known` holds the keys of recipes that were checked before.
    """
    _check_size(len(submission.function.blob), f"{name} and what it uses of its surroundings", what="function")
    messages: list[msgspec.Struct] = [
        *(
            to_manager.DefineRecipe(recipe)
            for recipe in (submission.recipe, *submission.variants)
            if recipe.key not in known
        ),
        to_manager.DefineFunction(submission.function.key, submission.function.name, b"", submission.function.place),
        submission.message([CallSpec(CallId(0), b"", features)], now=submission.due_at or 0.0),
    ]
    for message in messages:
        try:
            data = wire.encode([message])
            wrong = wrong_with(_decode(data).messages[0])
        except (ProtocolError, UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
            wrong = _what(message) or str(error).partition(" - at `$")[0]  # a path on the wire is no user's word
        if wrong:
            raise ConfigError(f"{name} can't be called as it is asked for: {wrong}")
        if isinstance(message, to_manager.DefineRecipe):
            _check_size(len(data), f"context {message.recipe.name}, its loader and its arguments", what="context")
    known.update(recipe.key for recipe in (submission.recipe, *submission.variants))


def _check_size(size: int, whose: str, *, what: str) -> None:
    if size > MOST_DEFINED_BYTES:
        raise SerializationError(
            f"{whose} take {show_bytes(size)}, and at most {show_bytes(MOST_DEFINED_BYTES)} travel with a {what}: pass "
            "large values as arguments of the call, or read them in a context's loader from a file (its files=...)",
            what=what,
        )


def _what(message: msgspec.Struct) -> str:
    """The smallest part of a message that cannot be sent, with its value."""
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        try:
            msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(value)), field.type)
        except (UnicodeEncodeError, OverflowError, TypeError, ValueError):
            parts = value if isinstance(value, list | tuple) else (value,)
            deeper = (_what(part) for part in parts if isinstance(part, msgspec.Struct))
            return next(filter(None, deeper), f"{field.name} is {value!r:.80}")
    return ""


# ---- prepared


SPECIFICATION = "parsl_resource_specification"
PACKED = "stoker_packed_arguments"
"""The keyword under which the bytes of a call's arguments pass through Parsl's kernel."""
PARSL_SPEC = "parsl_spec"
_RECIPES_KEPT = 32

Check = Callable[[Wants], None]
LeaveSource = Callable[[str, Callable[..., Any], Recipe], None]


class AppWants(dict[str, Any]):
    """The specification of a Stoker app, as Parsl hands it on: already read, and no argument of the function. `due_at`:
    the deadline that a first try of the call had, on the monotonic clock. `function`: its bytes when the call was made,
    those of the function object `made_of`; None = as it is when the call is sent."""

    def __init__(
        self,
        wants: Wants,
        *,
        due_at: float | None = None,
        function: FunctionBlob | None = None,
        made_of: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.wants = wants
        self.due_at = due_at
        self.function = function
        self.made_of = made_of
        self.inbox: PieceInbox | None = None
        """Where the pieces of this one call go."""
        self.content = ""
        """The digest of the function's content, where the results of calls are kept."""


class TriedWants(dict[str, Any]):
    """The specification of a call that is tried again, with the deadline of the first try."""

    def __init__(self, specification: Mapping[str, Any], *, due_at: float) -> None:
        super().__init__(specification)
        self.due_at = due_at


def for_one_call(specification: AppWants) -> AppWants:
    """A copy of a specification, with an inbox for the pieces of one call."""
    made = AppWants(
        specification.wants,
        due_at=specification.due_at,
        function=specification.function,
        made_of=specification.made_of,
    )
    made.content, made.inbox = specification.content, PieceInbox(keeps_all=True)
    return made


@id_for_memo.register(AppWants)  # type: ignore[untyped-decorator]  # parsl is untyped
def _id_for_memo(specification: AppWants, output_ref: bool = False) -> bytes:  # noqa: ARG001
    """A call's context and its function are part of what it computes, its priority is not."""
    return f"{specification.wants.recipe.key} {specification.content}".encode()


class PreparedFunction:
    """One function: how it is called. It does not hold the function, whose going makes it go."""

    def __init__(
        self, function: Callable[..., Any], cache: FunctionCache, check: Check, *, leave_source: LeaveSource
    ) -> None:
        self._leave_source = leave_source
        self.name = name_of(own(function))
        self._cache = cache
        self._check = check
        self._submissions: dict[tuple[int, int], tuple[Wants, CallPlace, Submission]] = {}
        self._spec_place = _place_of_parsl_spec(bare(function))
        self._told: set[str] = set()
        self._sendable: set[str] = set()
        self._content = ("", "")
        self._also = _NONE

    def blob(self, function: Callable[..., Any], wants: Wants) -> FunctionBlob:
        """The function's bytes, with what it captures as that is now. Raises SerializationError."""
        takes = wants.takes_context
        by_name = _carried(wants.recipe) if takes else _NONE
        return self._cache.blob(bare(function), takes_context=takes, by_name=by_name, also=self._also)

    def bring_along(self, modules: set[str]) -> None:
        """Have these modules travel with the function from now on: arguments of a call have brought them."""
        if modules:
            self._also |= modules

    def content(self, function: Callable[..., Any], blob: FunctionBlob) -> str:
        """The digest of a function's content, the same in another program; the key of its bytes where it has none."""
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
        """The submission of calls with these wants: one for each Wants object, so that its calls share messages.

        `due_at`: the deadline that a first try had, on the monotonic clock; without it the time to a deadline begins
        now. `blob`: the function's bytes when the call was made; without them as it is now. Raises what the executor's
        check raises, and ConfigError for what cannot be sent.
        """
        self._tell_of_context(wants.recipe)
        blob = self.blob(function, wants) if blob is None else blob
        known = self._submissions.get((id(wants), id(place)))
        if known is not None and known[0] is wants and known[1] is place and known[2].function is blob:
            return known[2]
        self._check(wants)
        if due_at is None:
            due_at = time.monotonic() + wants.deadline_s
        submission = Submission(
            function=blob,
            recipe=wants.recipe,
            options=wants.options_in(place),
            variants=wants.variants,
            due_at=due_at if wants.deadline_s else None,
        )
        check_submission(submission, wants.features, name=self.name, known=self._sendable)
        self._leave_source(blob.key, own(function), wants.recipe)
        if not wants.deadline_s:
            if len(self._submissions) > 256:
                self._submissions.clear()
            self._submissions[id(wants), id(place)] = (wants, place, submission)
        return submission

    def _tell_of_context(self, recipe: Recipe) -> None:
        """Say once that a recipe rests on something that has changed since it was made."""
        if recipe.key in self._told or not recipe.loader:
            return
        name = changed_since_made(recipe.key)
        if name:
            self._told.add(recipe.key)
            logger.warning(
                "context %s was made before %s changed, and is loaded as it was then; make it again (run the lines that"
                " call its loader, and those that decorate %s) to load it with the new one",
                recipe.name,
                name,
                self.name,
            )

    def parsl_spec(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The paper's `parsl_spec` among the arguments, or None."""
        if PARSL_SPEC in kwargs:
            return kwargs[PARSL_SPEC]
        place = self._spec_place
        return args[place] if place is not None and place < len(args) else None

    def with_parsl_spec(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], stand_in: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `stand_in` for `parsl_spec`: the loader has travelled with the recipe."""
        if PARSL_SPEC in kwargs:
            return args, {**kwargs, PARSL_SPEC: stand_in}
        place = self._spec_place or 0
        return (*args[:place], stand_in, *args[place + 1 :]), kwargs


class Preparer:
    """Finds what is known of a function and of a specification. `check` refuses what the engine cannot honour.
    `on_replaced(old, new)` is called for a function that is sent anew because what it captured has changed,
    `leave_source(key, function, recipe)` for one that is about to be sent under that key."""

    def __init__(
        self,
        check: Check = lambda _wants: None,
        *,
        on_replaced: Callable[[FunctionKey, FunctionKey], None] = lambda _key, _by: None,
        leave_source: LeaveSource = lambda _key, _function, _recipe: None,
    ) -> None:
        self._check = check
        self._leave_source = leave_source
        self._functions: weakref.WeakKeyDictionary[Any, PreparedFunction] = weakref.WeakKeyDictionary()
        self._cache = FunctionCache(on_replaced=on_replaced)
        self._plain = Wants()
        self._paper: list[tuple[list[Any], Recipe, Wants]] = []

    def function(self, function: Callable[..., Any]) -> PreparedFunction:
        """What is known of a function."""
        try:
            known = self._functions.get(function)
            if known is None:
                known = self._functions[function] = PreparedFunction(
                    function, self._cache, self._check, leave_source=self._leave_source
                )
            return known
        except TypeError:  # neither hashable nor weakly referable
            return PreparedFunction(function, self._cache, self._check, leave_source=self._leave_source)

    def wants(self, specification: Mapping[str, Any] | None) -> Wants:
        """What a specification says. Raises SpecificationError."""
        if not specification and not isinstance(specification, AppWants):
            return self._plain
        return specification.wants if isinstance(specification, AppWants) else read_wants(specification)

    def paper_wants(self, spec: Any) -> Wants:
        """What the paper's `parsl_spec` says. A recipe is made once for equal specifications."""
        context = spec.get("context") if isinstance(spec, Mapping) else None
        if isinstance(context, list | tuple):
            for known, _, wants in self._paper:
                if _same(known, context):
                    return wants
        recipe = read_parsl_spec(spec)
        wants = Wants(recipe=recipe)
        if isinstance(context, list | tuple):
            del self._paper[_RECIPES_KEPT:]
            self._paper.insert(0, (_copy(context), recipe, wants))
        return wants


_NONE: frozenset[str] = frozenset()


def travels_with(blob: FunctionBlob, recipe: Recipe) -> frozenset[str]:
    """The modules that travel with a function and with the context that its calls run on."""
    names = names_carried(blob.key, blob.blob)
    return names | _carried(recipe) if recipe.loader else names


def _carried(recipe: Recipe) -> frozenset[str]:
    return names_carried(recipe.key, recipe.loader)


def _copy(context: Any) -> list[Any]:
    """A copy that later changes of the caller's lists do not reach."""
    copies: dict[type, Callable[[Any], Any]] = {list: list, tuple: list, dict: dict}
    return [copies.get(type(part), lambda same: same)(part) for part in context]


def _same(known: list[Any], context: Any) -> bool:
    try:
        return bool(known == _copy(context))
    except Exception:  # arrays compare to arrays: such a recipe is made anew, and its digest finds it again
        return False


def _place_of_parsl_spec(function: Callable[..., Any]) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index(PARSL_SPEC) if PARSL_SPEC in names else None
