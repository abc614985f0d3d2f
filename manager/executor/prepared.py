"""Prepare calls for submission: the function's name and bytes, one `Submission` per specification, and the arguments.

A function is pickled once per map, or once per call of an app. The bytes are reused while all captured objects are
immutable and unchanged (`contexts.function_code`).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CellType
from typing import Any

import msgspec
import parsl
from parsl.app.bash import remote_side_bash_executor
from parsl.app.errors import wrap_error
from parsl.app.python import timeout
from parsl.dataflow.memoization import id_for_memo

from stoker.contexts.digest import digest_of
from stoker.contexts.factory import first_rebound_name
from stoker.contexts.function_code import Captured, SourceLines
from stoker.contexts.payloads import carried_module_names, dump_parts, dumps_arguments, dumps_code
from stoker.contexts.recipe import Recipe
from stoker.contexts.user_code import is_installed
from stoker.errors import ConfigError, ProtocolError, RecipeError, SerializationError
from stoker.manager.executor.options import ANYWHERE, CallPlace, Wants, parse_call_specification, read_parsl_spec
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.pieces import PieceInbox
from stoker.manager.executor.session_files import LargeArguments
from stoker.protocol import to_manager, wire
from stoker.protocol.bounds import MOST_DEFINED_BYTES, describe_invalid_message
from stoker.protocol.calls import INLINE_LIMIT_BYTES, CallSpec, Features, Payload
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.to_pilot import FunctionBlob
from stoker.units import show_bytes

logger = logging.getLogger("stoker.captured")

SPECIFICATION = "parsl_resource_specification"
PACKED = "stoker_packed_arguments"
"""The keyword that passes the bytes of a call's arguments through Parsl's kernel."""
PARSL_SPEC = "parsl_spec"
_RECIPES_KEPT = 32
_LARGE_BYTES = 1_000_000
_decode = wire.from_client_decoder()

# ---- names of functions


_WRAPPER_CODE = wrap_error(lambda: None).__code__
_PARSL = os.path.dirname(parsl.__file__) + os.sep
_MOST_WRAPPERS = 16
_TIMEOUT_CODE = timeout(lambda: None, 1).__code__


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function without `python_app`'s wrapper, which hides failures from the manager."""
    inner = getattr(function, "__wrapped__", None)
    return inner if inner is not None and getattr(function, "__code__", None) is _WRAPPER_CODE else function


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function without any of Parsl's wrappers."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(function, functools.partial) and function.func is remote_side_bash_executor and function.args:
            function = function.args[0]
            continue
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_PARSL):
            break
        cells = dict(zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False))
        inner = getattr(function, "__wrapped__", None) or cells.get("func") or cells.get("f")
        if isinstance(inner, CellType):
            inner = inner.cell_contents
        if not callable(inner):
            break
        function = inner
    return function


def is_same_function(made_of: Callable[..., Any] | None, function: Callable[..., Any]) -> bool:
    """Return True if both functions are the same, or Parsl's walltime wrappers of one function."""
    if made_of is function:
        return True
    codes = {getattr(made_of, "__code__", None), getattr(function, "__code__", None)}
    return codes == {_TIMEOUT_CODE} and made_of.__wrapped__ is function.__wrapped__  # type: ignore[union-attr,attr-defined]


def name_of(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function) if not hasattr(function, "__name__") else function
    name = getattr(inner, "__qualname__", None) or getattr(inner, "__name__", None) or type(function).__name__
    return str(name).replace("<locals>.", "").encode("utf-8", "replace").decode()


def place_of(function: Callable[..., Any]) -> str:
    """Return where a function is defined: a module's name or a file; empty if unknown."""
    with suppress(Exception):  # errors in the object's attributes must not stop the call
        inner = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
        module = str(getattr(inner, "__module__", None) or type(inner).__module__)
        code = getattr(inner, "__code__", None)
        if is_installed(module) or code is None or not os.path.isfile(code.co_filename):
            return module
        file: str = code.co_filename
        return os.path.realpath(file).encode("utf-8", "replace").decode()
    return ""


def inline_or_store_arguments(data: bytes, *, name: str, large: LargeArguments) -> Payload:
    if len(data) <= INLINE_LIMIT_BYTES:
        return data
    try:
        return large.put(data)
    except OSError as error:
        raise SerializationError(
            f"{name}: its arguments of {show_bytes(len(data))} cannot be written to {large.folder}: {error}; make room "
            "there, or keep sessions elsewhere with stoker.load(run_dir=...)",
            what="argument",
        ) from error


# ---- specifications that pass through Parsl's kernel


class AppWants(dict[str, Any]):
    """The parsed specification of a Stoker app, as Parsl passes it to the executor.

    `due_at`: the deadline of a call's first try. `function`: the bytes of `made_of` at the time of the call. `content`:
    the function's digest, if results are cached.
    """

    def __init__(
        self, wants: Wants, *, function: FunctionBlob | None = None, made_of: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.wants = wants
        self.due_at: float | None = None
        self.function = function
        self.made_of = made_of
        self.inbox: PieceInbox | None = None
        self.content = ""

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


def modules_pickled_with(blob: FunctionBlob, recipe: Recipe) -> frozenset[str]:
    return carried_module_names(blob.blob) | carried_module_names(recipe.loader)


class PreparedFunction:
    """A function's name, bytes and submissions, without a reference to the function."""

    def __init__(self, function: Callable[..., Any], preparer: Preparer) -> None:
        self.name = name_of(own(function))
        self._preparer = preparer
        self._lock = threading.RLock()
        self._captured: Captured | None = None
        """Objects that the function captures; None if one of them may change in place."""
        self._blobs: dict[tuple[Any, ...], FunctionBlob] = {}
        self._before: dict[tuple[Any, ...], FunctionBlob] = {}
        self._submissions: dict[tuple[int, int], tuple[Wants, CallPlace, Submission]] = {}
        """Keys are the ids of the options and the place. The values keep these objects alive, so ids stay unique."""
        self._spec_place: int | None = None
        with suppress(TypeError, ValueError):  # the function has no signature or no parameter `parsl_spec`
            self._spec_place = list(inspect.signature(function).parameters).index(PARSL_SPEC)
        self._told: set[str] = set()
        self._has_warned = False
        self._sendable: set[str] = set()
        self._content = ("", "")
        self.also = frozenset[str]()

    def blob(self, function: Callable[..., Any], wants: Wants) -> FunctionBlob:
        """Return the function's current bytes. Raises SerializationError."""
        function, takes = bare(function), wants.takes_context
        by_name = carried_module_names(wants.recipe.loader) if takes else frozenset[str]()
        how = (takes, by_name, self.also)
        with self._lock:
            if self._captured is None or self._captured.changed():
                self._before |= self._blobs
                self._blobs = {}
                captured = Captured(function)
                self._captured = None if captured.mutable else captured
            found = self._blobs.get(how)
            if found is None:
                before = self._before.pop(how, None)
                found = self._blobs[how] = _pickle_function(function, *how, before=before)
                if before is not None and found is not before:
                    self._preparer.on_replaced(before.key, found.key)
                if before is not None and self._captured is None and len(found.blob) > _LARGE_BYTES:
                    self._warn_of_repeated_pickling(function, len(found.blob))
            return found

    def _warn_of_repeated_pickling(self, function: Callable[..., Any], size: int) -> None:
        if self._has_warned:
            return
        self._has_warned, captured = True, Captured(function).mutable
        largest = max(captured, key=lambda name: _size_of(captured[name]))
        text = "%s uses %s, which may change: its %s are pickled with every call, and sent if they changed; load it in"
        logger.warning(text + " a context, or pass it as an argument", self.name, largest, show_bytes(size))

    def dumps(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, by_name: frozenset[str]) -> bytes:
        """Pickle a call's arguments. Modules that the arguments need are pickled with the function from now on
        (`also`)."""
        brought = set[str]()
        try:
            data = dumps_arguments((args, kwargs), by_name=by_name, brought=brought)
        except SerializationError as error:
            raise SerializationError(f"{self.name}: {error}", **error.facts) from error
        if brought:
            self.also |= brought
        return data

    def content(self, function: Callable[..., Any], blob: FunctionBlob) -> str:
        """Return a digest of the function's content, equal in all programs. Without a digest, return the key of the
        function's bytes."""
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
        """Return the submission for these options. Calls with the same Wants object and no deadline share a submission.
        `due_at`: the first try's deadline. `blob`: the function's bytes at the time of the call."""
        self._warn_of_changed_context(wants.recipe)
        blob = self.blob(function, wants) if blob is None else blob
        known = self._submissions.get((id(wants), id(place)))
        if known is not None and known[2].function is blob:
            return known[2]
        self._preparer.check(wants)
        if due_at is None:
            due_at = time.monotonic() + wants.deadline_s
        submission = Submission(
            function=blob,
            recipe=wants.recipe,
            options=msgspec.structs.replace(wants.options, folder=place.folder, home=place.home),
            variants=wants.variants,
            due_at=due_at if wants.deadline_s else None,
        )
        _check_can_be_sent(submission, wants.features, name=self.name, known=self._sendable)
        self._preparer.leave_source(blob.key, own(function), wants.recipe)
        if not wants.deadline_s:
            if len(self._submissions) > 256:
                self._submissions.clear()
            self._submissions[id(wants), id(place)] = (wants, place, submission)
        return submission

    def _warn_of_changed_context(self, recipe: Recipe) -> None:
        if recipe.loader and recipe.key not in self._told and (name := first_rebound_name(recipe.key)):
            self._told.add(recipe.key)
            text = "context %s was made before %s changed, and is loaded with the old value; to load it with the new"
            text += " value, run the lines that call its loader and decorate %s again"
            logger.warning(text, recipe.name, name, self.name)

    def read_parsl_spec(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Wants, tuple[Any, ...], dict[str, Any]] | None:
        """Return the options in a call's argument `parsl_spec`, and the arguments with the context replaced by its
        name."""
        place = self._spec_place if self._spec_place is not None and self._spec_place < len(args) else None
        spec = kwargs.get(PARSL_SPEC) if place is None else args[place]
        if spec is None:
            return None
        wants = self._preparer.wants_from_parsl_spec(spec)
        stand_in = {**spec, "context": wants.recipe.name}
        if place is None:
            return wants, args, {**kwargs, PARSL_SPEC: stand_in}
        return wants, (*args[:place], stand_in, *args[place + 1 :]), kwargs


def _size_of(value: Any) -> int:
    try:
        return sum(memoryview(part).nbytes for part in dump_parts(value))
    except Exception:
        return 0


def _pickle_function(
    function: Callable[..., Any], takes_context: bool, by_name: frozenset[str], also: frozenset[str], *,
    before: FunctionBlob | None,
) -> FunctionBlob:  # fmt: skip
    name = name_of(own(function))
    try:
        data = dumps_code((function, takes_context, SourceLines()), what="function", by_name=by_name, also=also)
    except SerializationError as error:
        raise SerializationError(f"function {name}: {error}", what="function", function=name) from error
    if before is not None and before.blob == data:
        return before
    key = FunctionKey(hashlib.blake2b(data, digest_size=16).hexdigest())
    return FunctionBlob(key=key, name=name, blob=data, place=before.place if before is not None else place_of(function))


def _check_can_be_sent(submission: Submission, features: Features | None, *, name: str, known: set[str]) -> None:
    """Raise ConfigError or SerializationError for calls that cannot be sent. `known`: keys of checked recipes."""
    function, recipes = submission.function, (submission.recipe, *submission.variants)
    _check_pickle_size(len(function.blob), f"{name} and the names that it uses", what="function")
    for message in (
        *(to_manager.DefineRecipe(recipe) for recipe in recipes if recipe.key not in known),
        to_manager.DefineFunction(function.key, function.name, b"", function.place),
        submission.message([CallSpec(CallId(0), b"", features)], now=submission.due_at or 0.0),
    ):
        try:
            data = wire.encode([message])
            wrong = describe_invalid_message(_decode(data).messages[0])
        except (ProtocolError, UnicodeEncodeError, OverflowError, TypeError, ValueError) as error:
            wrong = str(error).partition(" - at `$")[0]  # omit msgspec's path, which users do not know
        if wrong:
            raise ConfigError(f"{name} cannot be called with these arguments: {wrong}")
        if isinstance(message, to_manager.DefineRecipe):
            whose = f"context {message.recipe.name}, its loader and its arguments"
            _check_pickle_size(len(data), whose, what="context")
    known.update(recipe.key for recipe in recipes)


def _check_pickle_size(size: int, whose: str, *, what: str) -> None:
    if size > MOST_DEFINED_BYTES:
        raise SerializationError(
            f"{whose} take {show_bytes(size)}, and at most {show_bytes(MOST_DEFINED_BYTES)} are sent with a {what}:"
            " pass large values as arguments of the call, or read them in a context's loader from a file (its"
            " files=...)",
            what=what,
        )


class Preparer:
    """Creates and caches the PreparedFunction of each function. `check` rejects options that the engine cannot honour.
    `on_replaced` gets the keys of a changed function's old and new bytes.
    """

    def __init__(
        self, check: Callable[[Wants], None] = lambda _wants: None, *,
        on_replaced: Callable[[FunctionKey, FunctionKey], None] = lambda _key, _by: None,
        leave_source: Callable[[str, Callable[..., Any], Recipe], None] = lambda _key, _function, _recipe: None,
    ) -> None:  # fmt: skip
        self.check = check
        self.on_replaced = on_replaced
        self.leave_source = leave_source
        self._functions: weakref.WeakKeyDictionary[Any, PreparedFunction] = weakref.WeakKeyDictionary()
        self._plain = Wants()
        self._paper: list[tuple[list[Any], Wants]] = []

    def function(self, function: Callable[..., Any]) -> PreparedFunction:
        function = bare(function)
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
        copied = [type(part)(part) if type(part) in (list, tuple, dict) else part for part in context]
        for known, wants in self._paper:
            with suppress(Exception):  # comparing arrays raises; if the recipe is made again, it has the same digest
                if known == copied:
                    return wants
        wants = Wants(recipe=read_parsl_spec(spec))
        del self._paper[_RECIPES_KEPT:]
        self._paper.insert(0, (copied, wants))
        return wants
