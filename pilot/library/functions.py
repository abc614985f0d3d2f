"""The functions of a library: a cache by key, unpickling, and the choice of calls that may run at the same time.

Slots share one `sys.modules`, so calls with different versions of a module run one at a time.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.contexts import payloads
from stoker.contexts.folders import is_visible_here
from stoker.contexts.payload_layout import WITH_MODULES, Buffer
from stoker.contexts.payloads import loads_code, versions_of_sent_modules
from stoker.contexts.recipe import ObjectRef
from stoker.contexts.user_modules import NO_MODULES, context_module_versions, count_replacements
from stoker.errors import SerializationError
from stoker.pilot.core.turns import CallQueue
from stoker.pilot.library.connection import LibrarySettings
from stoker.protocol.calls import INLINE_LIMIT_BYTES, CallSpec, Failure, FailureKind, Payload
from stoker.protocol.to_library import Run
from stoker.protocol.to_pilot import FunctionBlob
from stoker.whole_files import write_all

# ---- functions

_MOST_FUNCTIONS = 128
_MOST_FUNCTION_BYTES = 128_000_000


class Function:
    """A user's function. The thread that runs its first call unpickles it."""

    def __init__(self, blob: FunctionBlob) -> None:
        self.name = blob.name
        self.size_bytes = len(blob.blob)
        self.mean_s = 0.0  # mean run time of the function's calls in seconds, weighted to recent calls (0: unknown)
        self._blob = blob.blob
        self._lock = threading.Lock()
        self._unpickled: tuple[Callable[..., Any], bool] | None = None
        self._modules = NO_MODULES
        self._replaced_modules = 0  # number of replaced modules in this process when the function was unpickled

    @functools.cached_property
    def carried_modules(self) -> Mapping[str, str]:
        return versions_of_sent_modules(self._blob)

    def unpickle(self) -> tuple[Callable[..., Any], bool]:
        """Return the function, and True if its first argument is the context."""
        self._modules.activate()
        opened = self._unpickled
        if opened is None or self._replaced_modules != count_replacements():
            with self._lock:  # several slots may run the function's first call at the same time
                opened = self._unpickled
                # Unpickle again after a module was replaced, because globals may refer to the old module.
                if opened is None or self._replaced_modules != count_replacements():
                    (function, takes_context, *_), self._modules = loads_code(self._blob)
                    self._unpickled = opened = (function, takes_context)
                    self._replaced_modules = count_replacements()
        return opened

    def unpickle_arguments(self, data: Buffer) -> Any:
        """Unpickle a call's arguments. Modules sent with the arguments override those sent with the function."""
        return loads_code(data, under=self._modules)[0] if data[:1] == WITH_MODULES else payloads.loads(data)

    def record_run_time(self, seconds: float) -> None:
        self.mean_s = seconds if not self.mean_s else 0.7 * self.mean_s + 0.3 * seconds


class RunnableCall(msgspec.Struct, frozen=True):
    spec: CallSpec
    order: Run
    function: Function


class FunctionCache:
    """A cache of at most 128 functions with together at most 128 MB, or of one larger function."""

    def __init__(self) -> None:
        self._total_bytes = 0
        self._functions: OrderedDict[str, Function] = OrderedDict()

    def find_or_add(self, key: str, blob: FunctionBlob | None) -> Function | None:
        found = self._functions.get(key)
        if found is None:
            if blob is None:
                return None
            found = self._functions[key] = Function(blob)
            self._total_bytes += found.size_bytes
            while len(self._functions) > _MOST_FUNCTIONS or (
                self._total_bytes > _MOST_FUNCTION_BYTES and len(self._functions) > 1
            ):
                self._total_bytes -= self._functions.popitem(last=False)[1].size_bytes
        else:
            self._functions.move_to_end(key)
        return found


# ---- pickling

_SMALL_TYPES = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict, complex})


class TransferError(Exception):
    """A call's function or arguments cannot be read (a package or file is missing), or its result cannot be sent."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class CallPickler:
    def __init__(self, settings: LibrarySettings) -> None:
        self._settings = settings

    def make_error(self, message: str) -> TransferError:
        return TransferError(self._settings.make_failure(FailureKind.SERIALIZATION, message))

    # ---- functions and arguments

    def unpickle_function(self, function: Function) -> tuple[Callable[..., Any], bool]:
        try:
            return function.unpickle()
        except BaseException as error:
            self._explain_unpickle_error(error, f"the function {function.name} was")
            raise

    def unpickle_arguments(
        self, function: Function, payload: Payload, objects: Mapping[str, str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        data: Any = payload
        if isinstance(data, ObjectRef):
            try:
                data = _map_file(objects.get(data.name) or data.source)
            except OSError as error:
                what = f"the arguments of {function.name} could not be read on {self._settings.pilot}"
                raise self.make_error(f"{what}: {type(error).__name__}: {error}") from error
        try:
            args, kwargs = function.unpickle_arguments(data)
        except BaseException as error:
            self._explain_unpickle_error(error, f"the arguments of {function.name} were")
            raise
        return args, kwargs

    def _explain_unpickle_error(self, error: BaseException, what_was: str) -> None:
        text = f"{what_was.rpartition(' ')[0]} could not be unpickled on {self._settings.pilot}"
        if isinstance(error, ImportError):
            raise self.make_error(
                f"{text}: {type(error).__name__}: {error}; its imports must be installed there"
            ) from error
        if isinstance(error, SerializationError):
            raise self.make_error(f"{text}: {error}") from error
        with contextlib.suppress(Exception):  # a user's exception class may reject notes
            error.add_note(f"while {what_was} unpickled on {self._settings.pilot}")

    # ---- results and exceptions

    def pickle_parts(self, value: Any, *, what: str) -> list[Any]:
        """Return the pickled parts of a result or of a yielded piece. `what` names the value in errors. Raises
        TransferError.
        """
        try:
            if type(value) in _SMALL_TYPES:
                return [payloads.dumps(value, what=what)]
            return payloads.dump_parts(value, what=what)
        except SerializationError as error:
            raise self.make_error(str(error)) from error
        except BaseException as error:
            text = f"the {what}, a {type(value).__name__}, could not be pickled: {type(error).__name__}: {error}"
            raise self.make_error(text) from error

    def pickle_result(self, call: int, result: Any) -> Payload:
        parts = self.pickle_parts(result, what="result")
        if len(parts) == 1 and len(parts[0]) <= INLINE_LIMIT_BYTES:
            return parts[0] if type(parts[0]) is bytes else bytes(parts[0])
        if sum(map(len, parts)) <= INLINE_LIMIT_BYTES:
            return b"".join(parts)
        return self._write_result_file(call, parts)

    def pickle_exception(self, call: int, error: BaseException) -> Payload:
        """Return an exception as a pickled payload, and drop the exception's stack frames."""
        if error.__traceback__ is not None:  # make the traceback begin at the first frame of user code
            error.__traceback__ = error.__traceback__.tb_next
        data = payloads.dump_exception(error)
        error.__traceback__ = None  # stack frames would keep the call's arguments in memory
        if len(data) <= INLINE_LIMIT_BYTES:
            return data
        try:
            return self._write_result_file(call, [data])
        except TransferError:
            return payloads.dump_exception(
                SerializationError(f"an exception {type(error).__name__} of {len(data)} bytes was lost")
            )

    def _write_result_file(self, call: int, parts: list[Any]) -> ObjectRef:
        size = sum(map(len, parts))
        name = f"result-{call:x}-{uuid.uuid4().hex[:12]}"
        path = Path(self._settings.objects) / name
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                for part in parts:
                    write_all(file.fileno(), part)
        except OSError as error:
            path.unlink(missing_ok=True)
            text = f"a result of {size} bytes could not be written to {path}: {error}; free disk space there"
            raise self.make_error(text) from error
        return ObjectRef(name=name, size_bytes=size, source=str(path))


def _map_file(path: str) -> memoryview:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(bytearray())
        return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


# ---- calls that may run at the same time

_Versions = Mapping[str, str]  # module versions that a call needs, by module name
_FOLDER = "/"  # key of the call's working folder in `_Versions`; no module has this name


class CallCompatibility:
    """Chooses calls that may run at the same time. The caller must hold a lock during each method."""

    def __init__(self) -> None:
        self._context_versions = context_module_versions()
        self._running: dict[int, _Versions] = {}
        self._versions_of_next_call: tuple[RunnableCall, _Versions] | None = None
        self._has_waiting_call = False
        self.has_shared_folder = False  # True if all slots share one working folder
        self._is_visible_here = functools.cache(is_visible_here)

    def take_next_call(self, queue: CallQueue[RunnableCall], slot: int) -> RunnableCall | None:
        """Return the next call for a slot, or None if no call may begin yet."""
        while (entry := queue.peek()) is not None:
            versions = self._needed_versions(entry[1])
            if any(
                other.get(name, version) != version
                for other in self._running.values()
                for name, version in versions.items()
            ):
                self._has_waiting_call = True
                return None
            if queue.remove_entry(entry):
                self._running[slot] = versions
                self._versions_of_next_call = None
                return entry[1]
        return None

    def record_call_end(self, slot: int) -> bool:
        """Record the end of a slot's call. Return True if another call may be waiting for this end."""
        self._running.pop(slot, None)
        waits, self._has_waiting_call = self._has_waiting_call, False
        return waits

    def _needed_versions(self, work: RunnableCall) -> _Versions:
        if self._versions_of_next_call is not None and self._versions_of_next_call[0] is work:
            return self._versions_of_next_call[1]
        versions, payload = work.function.carried_modules, work.spec.payload
        if self._context_versions:
            versions = {**self._context_versions, **versions}
        where = work.order.objects.get(payload.name) or payload.source if isinstance(payload, ObjectRef) else payload
        if brought := versions_of_sent_modules(where):
            versions = {**versions, **brought}
        if self.has_shared_folder:
            folder, home = work.order.options.folder, work.order.options.home
            is_named = folder or (home is not None and self._is_visible_here(home))
            versions = {**versions, _FOLDER: f"{folder} {home}" if is_named else str(work.spec.call)}
        self._versions_of_next_call = work, versions
        return versions
