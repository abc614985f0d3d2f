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
from stoker.contexts.factory import find_rebound_name_in_loader
from stoker.contexts.function_code import CapturedObjects, SourceLines
from stoker.contexts.payloads import dump_parts, dumps_arguments, dumps_code, names_of_sent_modules
from stoker.contexts.recipe import Recipe
from stoker.contexts.user_code import is_installed
from stoker.errors import ConfigError, ProtocolError, RecipeError, SerializationError
from stoker.manager.executor.options import (
    ANYWHERE,
    CallFolder,
    CallRequirements,
    parse_call_specification,
    read_parsl_spec,
)
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.pieces import PieceInbox
from stoker.manager.executor.session_files import LargeArgumentFiles
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


def without_error_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function without `python_app`'s wrapper, which hides failures from the manager."""
    inner = getattr(function, "__wrapped__", None)
    return inner if inner is not None and getattr(function, "__code__", None) is _WRAPPER_CODE else function


def without_parsl_wrappers(function: Callable[..., Any]) -> Callable[..., Any]:
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


def is_same_function(pickled_from: Callable[..., Any] | None, function: Callable[..., Any]) -> bool:
    """Return True if both functions are the same, or Parsl's walltime wrappers of one function."""
    if pickled_from is function:
        return True
    codes = {getattr(pickled_from, "__code__", None), getattr(function, "__code__", None)}
    if codes != {_TIMEOUT_CODE}:
        return False
    return pickled_from.__wrapped__ is function.__wrapped__  # type: ignore[union-attr,attr-defined]


def function_name(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function) if not hasattr(function, "__name__") else function
    name = getattr(inner, "__qualname__", None) or getattr(inner, "__name__", None) or type(function).__name__
    return str(name).replace("<locals>.", "").encode("utf-8", "replace").decode()


def find_definition_place(function: Callable[..., Any]) -> str:
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


def inline_or_store_arguments(data: bytes, *, name: str, large: LargeArgumentFiles) -> Payload:
    if len(data) <= INLINE_LIMIT_BYTES:
        return data
    try:
        return large.store_arguments(data)
    except OSError as error:
        raise SerializationError(
            f"{name}: its arguments of {show_bytes(len(data))} cannot be written to {large.folder}: {error}; make room "
            "there, or keep sessions elsewhere with stoker.load(run_dir=...)",
            what="argument",
        ) from error


# ---- specifications that pass through Parsl's kernel


class AppSpecification(dict[str, Any]):
    """The parsed specification of a Stoker app, as Parsl passes it to the executor.

    `due_at`: the deadline of a call's first try. `function`: the bytes of `pickled_from` at the time of the call.
    `content_digest`: the function's digest, if results are cached.
    """

    def __init__(
        self, requirements: CallRequirements, *, function: FunctionBlob | None = None,
        pickled_from: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.requirements = requirements
        self.due_at: float | None = None
        self.function = function
        self.pickled_from = pickled_from
        self.inbox: PieceInbox | None = None
        self.content_digest = ""

    def copy_with(self, **changes: Any) -> AppSpecification:
        copied = copy.copy(self)
        vars(copied).update(changes)
        return copied


class RetrySpecification(dict[str, Any]):
    def __init__(self, specification: Mapping[str, Any], *, due_at: float) -> None:
        super().__init__(specification)
        self.due_at = due_at


@id_for_memo.register(AppSpecification)  # type: ignore[untyped-decorator]  # parsl is untyped
def _id_for_memo(specification: AppSpecification, output_ref: bool = False) -> bytes:  # noqa: ARG001
    return f"{specification.requirements.recipe.key} {specification.content_digest}".encode()


def modules_pickled_with(blob: FunctionBlob, recipe: Recipe) -> frozenset[str]:
    return names_of_sent_modules(blob.blob) | names_of_sent_modules(recipe.loader)


class PreparedFunction:
    """A function's name, bytes and submissions, without a reference to the function."""

    def __init__(self, function: Callable[..., Any], preparer: FunctionPreparer) -> None:
        self.name = function_name(without_parsl_wrappers(function))
        self._preparer = preparer
        self._lock = threading.RLock()
        self._captured: CapturedObjects | None = None
        """Objects that the function captures; None if one of them may change in place."""
        self._blobs: dict[tuple[Any, ...], FunctionBlob] = {}
        self._before: dict[tuple[Any, ...], FunctionBlob] = {}
        self._submissions: dict[tuple[int, int], tuple[CallRequirements, CallFolder, Submission]] = {}
        """The keys are ids of requirements and folder. The values keep both objects alive, so the ids stay unique."""
        self._spec_place: int | None = None
        with suppress(TypeError, ValueError):  # the function has no signature or no parameter `parsl_spec`
            self._spec_place = list(inspect.signature(function).parameters).index(PARSL_SPEC)
        self._warned_contexts: set[str] = set()
        self._has_warned_of_pickling = False
        self._checked_recipes: set[str] = set()
        self._content = ("", "")
        self.modules_to_pickle = frozenset[str]()

    def current_blob(self, function: Callable[..., Any], requirements: CallRequirements) -> FunctionBlob:
        """Return the function's current bytes. Raises SerializationError."""
        function, takes = without_error_wrapper(function), requirements.takes_context
        by_name = names_of_sent_modules(requirements.recipe.loader) if takes else frozenset[str]()
        how = (takes, by_name, self.modules_to_pickle)
        with self._lock:
            if self._captured is None or self._captured.find_rebound_name():
                self._before |= self._blobs
                self._blobs = {}
                captured = CapturedObjects(function)
                self._captured = None if captured.mutable_objects else captured
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
        if self._has_warned_of_pickling:
            return
        self._has_warned_of_pickling, captured = True, CapturedObjects(function).mutable_objects
        largest = max(captured, key=lambda name: _pickled_size(captured[name]))
        text = "%s uses %s, which may change: its %s are pickled with every call, and sent if they changed; load it in"
        logger.warning(text + " a context, or pass it as an argument", self.name, largest, show_bytes(size))

    def pickle_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, by_name: frozenset[str]) -> bytes:
        """Pickle a call's arguments. From now on, modules that the arguments need are pickled with the function
        (`modules_to_pickle`)."""
        brought = set[str]()
        try:
            data = dumps_arguments((args, kwargs), by_name=by_name, brought=brought)
        except SerializationError as error:
            raise SerializationError(f"{self.name}: {error}", **error.facts) from error
        if brought:
            self.modules_to_pickle |= brought
        return data

    def content_digest(self, function: Callable[..., Any], blob: FunctionBlob) -> str:
        """Return a digest of the function's content, equal in all programs. Without a digest, return the key of the
        function's bytes."""
        if self._content[0] != blob.key:
            try:
                self._content = (blob.key, digest_of(without_parsl_wrappers(function)))
            except RecipeError:
                self._content = (blob.key, blob.key)
        return self._content[1]

    def create_submission(
        self, function: Callable[..., Any], requirements: CallRequirements, *, place: CallFolder = ANYWHERE,
        due_at: float | None = None, blob: FunctionBlob | None = None,
    ) -> Submission:  # fmt: skip
        """Return the submission for these options. Calls without deadlines and with the same requirements object
        share a submission. `due_at`: the first try's deadline. `blob`: the function's bytes at the time of the call."""
        self._warn_of_changed_context(requirements.recipe)
        blob = self.current_blob(function, requirements) if blob is None else blob
        known = self._submissions.get((id(requirements), id(place)))
        if known is not None and known[2].function is blob:
            return known[2]
        self._preparer.check(requirements)
        if due_at is None:
            due_at = time.monotonic() + requirements.deadline_s
        submission = Submission(
            function=blob,
            recipe=requirements.recipe,
            options=msgspec.structs.replace(requirements.options, folder=place.folder, home=place.home),
            variants=requirements.variants,
            due_at=due_at if requirements.deadline_s else None,
        )
        _check_can_be_sent(submission, requirements.features, name=self.name, known=self._checked_recipes)
        self._preparer.store_sources(blob.key, without_parsl_wrappers(function), requirements.recipe)
        if not requirements.deadline_s:
            if len(self._submissions) > 256:
                self._submissions.clear()
            self._submissions[id(requirements), id(place)] = (requirements, place, submission)
        return submission

    def _warn_of_changed_context(self, recipe: Recipe) -> None:
        if (
            recipe.loader
            and recipe.key not in self._warned_contexts
            and (name := find_rebound_name_in_loader(recipe.key))
        ):
            self._warned_contexts.add(recipe.key)
            text = "context %s was made before %s changed, and is loaded with the old value; to load it with the new"
            text += " value, run the lines that call its loader and decorate %s again"
            logger.warning(text, recipe.name, name, self.name)

    def read_parsl_spec(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallRequirements, tuple[Any, ...], dict[str, Any]] | None:
        """Return the options in a call's argument `parsl_spec`, and the arguments with the context replaced by its
        name."""
        place = self._spec_place if self._spec_place is not None and self._spec_place < len(args) else None
        spec = kwargs.get(PARSL_SPEC) if place is None else args[place]
        if spec is None:
            return None
        requirements = self._preparer.parse_parsl_spec(spec)
        stand_in = {**spec, "context": requirements.recipe.name}
        if place is None:
            return requirements, args, {**kwargs, PARSL_SPEC: stand_in}
        return requirements, (*args[:place], stand_in, *args[place + 1 :]), kwargs


def _pickled_size(value: Any) -> int:
    try:
        return sum(memoryview(part).nbytes for part in dump_parts(value))
    except Exception:
        return 0


def _pickle_function(
    function: Callable[..., Any], takes_context: bool, by_name: frozenset[str], also: frozenset[str], *,
    before: FunctionBlob | None,
) -> FunctionBlob:  # fmt: skip
    name = function_name(without_parsl_wrappers(function))
    try:
        data = dumps_code((function, takes_context, SourceLines()), what="function", by_name=by_name, also=also)
    except SerializationError as error:
        raise SerializationError(f"function {name}: {error}", what="function", function=name) from error
    if before is not None and before.blob == data:
        return before
    key = FunctionKey(hashlib.blake2b(data, digest_size=16).hexdigest())
    return FunctionBlob(
        key=key, name=name, blob=data, place=before.place if before is not None else find_definition_place(function)
    )


def _check_can_be_sent(submission: Submission, features: Features | None, *, name: str, known: set[str]) -> None:
    """Raise ConfigError or SerializationError for calls that cannot be sent. `known`: keys of checked recipes."""
    function, recipes = submission.function, (submission.recipe, *submission.variants)
    _check_pickle_size(len(function.blob), f"{name} and the names that it uses", what="function")
    for message in (
        *(to_manager.DefineRecipe(recipe) for recipe in recipes if recipe.key not in known),
        to_manager.DefineFunction(function.key, function.name, b"", function.place),
        submission.create_submit([CallSpec(CallId(0), b"", features)], now=submission.due_at or 0.0),
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


class FunctionPreparer:
    """Creates and caches the PreparedFunction of each function. `check` rejects options that the engine cannot honour.
    `on_replaced` gets the keys of a changed function's old and new bytes.
    """

    def __init__(
        self, check: Callable[[CallRequirements], None] = lambda _requirements: None, *,
        on_replaced: Callable[[FunctionKey, FunctionKey], None] = lambda _key, _by: None,
        store_sources: Callable[[str, Callable[..., Any], Recipe], None] = lambda _key, _function, _recipe: None,
    ) -> None:  # fmt: skip
        self.check = check
        self.on_replaced = on_replaced
        self.store_sources = store_sources
        self._functions: weakref.WeakKeyDictionary[Any, PreparedFunction] = weakref.WeakKeyDictionary()
        self._plain = CallRequirements()
        self._parsl_spec_requirements: list[tuple[list[Any], CallRequirements]] = []

    def prepare_function(self, function: Callable[..., Any]) -> PreparedFunction:
        function = without_error_wrapper(function)
        try:
            known = self._functions.get(function)
        except TypeError:  # do not cache a function that is unhashable or allows no weak reference
            known = None
        if known is None:
            known = PreparedFunction(function, self)
            with suppress(TypeError):
                self._functions[function] = known
        return known

    def parse_specification(self, specification: Mapping[str, Any] | None) -> CallRequirements:
        if isinstance(specification, AppSpecification):
            return specification.requirements
        return parse_call_specification(specification) if specification else self._plain

    def parse_parsl_spec(self, spec: Any) -> CallRequirements:
        context = spec.get("context") if isinstance(spec, Mapping) else None
        if not isinstance(context, list | tuple):
            return CallRequirements(recipe=read_parsl_spec(spec))
        copied = [type(part)(part) if type(part) in (list, tuple, dict) else part for part in context]
        for known, requirements in self._parsl_spec_requirements:
            with suppress(Exception):  # comparing arrays raises; then the recipe is created again, with the same digest
                if known == copied:
                    return requirements
        requirements = CallRequirements(recipe=read_parsl_spec(spec))
        del self._parsl_spec_requirements[_RECIPES_KEPT:]
        self._parsl_spec_requirements.insert(0, (copied, requirements))
        return requirements
