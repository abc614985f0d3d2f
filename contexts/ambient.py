"""Functions that user code calls inside a library, for example to get the device or to report progress.

The *library scope* is a global variable of the process. Each slot has a *call scope*, a context variable. Threads that
the user's code starts use the scope of the newest call. `StopRequest.request` wakes the waiting threads of a call, and
these threads raise `Evicted`.
"""

from __future__ import annotations

import contextvars
import functools
import math
import os
import socket
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from stoker.contexts import payloads
from stoker.errors import SerializationError, StokerError
from stoker.units import show_bytes


class Evicted(BaseException):
    """Raised in a call that must stop. Derives from BaseException, because retry loops catch `Exception`.

    Args:
        state: Pickled checkpoint of the call.
    """

    def __init__(self, state: bytes = b"") -> None:
        super().__init__("the call was asked to stop")
        self.state = state


class StopRequest:
    """The request to stop one call: whether it was made, and functions that wake the call's waiting threads."""

    __slots__ = ("_wake_functions", "is_requested")

    def __init__(self) -> None:
        self.is_requested = False
        self._wake_functions: dict[Callable[[], None], None] = {}

    def request(self) -> None:
        self.is_requested = True
        for wake in list(self._wake_functions):
            wake()

    def raise_if_requested(self) -> None:
        if self.is_requested:
            raise Evicted

    def add_wake_function(self, wake: Callable[[], None]) -> None:
        """Register a function that wakes a waiting thread. `request` calls it at most twice, in any thread."""
        self._wake_functions[wake] = None
        if self.is_requested:
            wake()

    def remove_wake_function(self, wake: Callable[[], None]) -> None:
        self._wake_functions.pop(wake, None)


def related_exceptions(error: BaseException) -> Iterable[BaseException]:
    """Return an exception, each `__cause__` and `__context__`, and the members of exception groups."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            waiting += (one.__cause__, one.__context__)
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return found.values()


def is_caused_by_eviction(error: BaseException) -> bool:
    return any(isinstance(one, Evicted) for one in related_exceptions(error))


@dataclass(kw_only=True, eq=False, repr=False)
class Gang:
    """This process's rank in a gang (the processes that run one call together), from 0 to `size` - 1.

    Rank 0 listens at `rendezvous` (`host:port`) on `listener`. Stoker closes this socket with the call, unless the
    function has called `detach`. The port is open to the network, so check that each peer knows `key`.
    """

    rank: int
    size: int
    rendezvous: str = ""
    listener: socket.socket | None = None
    key: bytes = b""

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}{f' meeting at {self.rendezvous}' if self.rendezvous else ''}>"

    def close(self) -> None:
        """Close the listening socket."""
        if self.listener is not None:
            self.listener.close()


class TextSink(Protocol):
    """Receives the texts of a call in the engine's thread. The methods must not block."""

    def add(self, text: str) -> bool:
        """Accept a text as the next piece, or return False if the client must first acknowledge earlier pieces."""

    def send(self) -> None:
        """Send the collected texts of all sinks of the library to the pilot."""


class RelayedTexts(Iterable[str]):
    """Texts that a function yields as one object. The library sends each text to the client as a piece."""

    @abstractmethod
    def send_to(self, sink: TextSink) -> Generator[str, None, None]:
        """Yield the texts that `sink`, which gets each text first, does not accept.

        Args:
            sink: Receives texts in the engine's thread.
        """


JoinGangHook = Callable[[float], Gang]
"""Function that receives the maximum seconds to wait for rank 0, and returns the `Gang` of this process."""

MOST_STATE_BYTES = 16_000_000
"""Maximum bytes of a checkpoint, which must fit into one protocol frame."""

ProgressHook = Callable[[float, float, float, bytes], bool]
"""Function that receives `done, total, metric, state` (pickled), and returns True if the call is evicted."""
TokenDueHook = Callable[[int], tuple[float, float]]
SnapshotHook = Callable[[str, str, float], None]
"""Function that receives the name of a new snapshot, its folder, and the seconds that its creation took."""


class _LibraryScope(NamedTuple):
    devices: tuple[str, ...]
    context: Any = None
    objects: Mapping[str, str] = {}
    offer: SnapshotHook | None = None
    device_memory_bytes: int = 0


@dataclass(eq=False, slots=True)
class _CallScope:
    hook: ProgressHook | None = None
    folder: str = ""
    state: bytes = b""
    join_gang: JoinGangHook | None = None
    token_due_hook: TokenDueHook | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    place: Gang | None = None


_NO_LIBRARY, _NO_CALL = _LibraryScope(()), _CallScope()
_library = _NO_LIBRARY
_call: contextvars.ContextVar[_CallScope | None] = contextvars.ContextVar("stoker_call", default=None)
_latest_call = _NO_CALL
_running: dict[_CallScope, None] = {}


def device() -> str:
    """Return the PyTorch name of this library's first device: `cuda:0` or `cpu`."""
    return devices()[0]


def devices() -> tuple[str, ...]:
    """Return the PyTorch names of all devices of this library. Each CPU device is `cpu`."""
    if _library.devices:
        return _library.devices
    torch = sys.modules.get("torch")
    return ("cuda:0",) if torch is not None and torch.cuda.is_available() else ("cpu",)


def load_variable_from_serverless(name: str) -> Any:
    """Return a variable of this library's context, whose loader must return a dict.

    Args:
        name: Key of the variable.

    Raises:
        StokerError: No context is loaded here, or the dict lacks the key.
    """
    call = f"load_variable_from_serverless({name!r})"
    if _library is _NO_LIBRARY:
        raise StokerError(f"{call} works only inside a library, in a function of an app with a context (context=)")
    context = _library.context
    if not isinstance(context, Mapping):
        kind = type(context).__name__
        raise StokerError(f"{call}: the loader of this context returned a {kind}, not a dict of variables")
    if name not in context:
        there = ", ".join(sorted(map(repr, context))) or "none"
        raise StokerError(f"the context has no variable {name!r}; its loader returned {there}")
    return context[name]


def progress(done: float, total: float = 0, metric: float = 0.0, state: Any = None) -> None:
    """Report the progress of the running call. Outside of a call, do nothing.

    Raises `stoker.contexts.Evicted` if the call must stop. An evicted call restarts elsewhere with `saved_state()`.

    Args:
        done: Number of finished steps.
        total: Total number of steps; 0 if unknown.
        metric: Quality of the result so far.
        state: A picklable checkpoint of at most 16 MB, or a function that returns one.

    Raises:
        SerializationError: The checkpoint is too large or cannot be pickled.
    """
    scope = _current_call_scope()
    if scope.hook is None:
        return
    made = state() if callable(state) else state
    packed = b"" if made is None else payloads.dumps(made, what="checkpoint")
    if len(packed) > MOST_STATE_BYTES:
        size, most = show_bytes(len(packed)), show_bytes(MOST_STATE_BYTES)
        advice = "write the checkpoint to a shared file, and pass the name of the file as the state"
        raise SerializationError(f"the checkpoint of {size} is larger than {most}; {advice}", what="checkpoint")
    if scope.hook(float(done), float(total), float(metric), packed):
        raise Evicted(packed)


def saved_state(default: Any = None) -> Any:
    """Return the checkpoint that this call saved before its eviction.

    Args:
        default: Value to return without a checkpoint.
    """
    state = _current_call_scope().state
    return payloads.loads(state, keep_classes=True) if state else default


def gang(*, limit_s: float = 60.0) -> Gang:
    """Return the rank of this process in the call's gang; outside of a gang, rank 0 of 1.

    Args:
        limit_s: Maximum seconds to wait for the address of rank 0.

    Raises:
        GangBroken: Rank 0 did not open its port in time.
    """
    scope = _current_call_scope()
    if scope.join_gang is None:
        return Gang(rank=0, size=1)
    if scope.place is None:
        scope.place = scope.join_gang(limit_s)
    return scope.place


def token_due_times(prompt_tokens: int) -> tuple[float, float]:
    """Return the time when the call's first token is due, and the seconds between later tokens (0: no deadline)."""
    token_due_hook = _current_call_scope().token_due_hook
    return token_due_hook(prompt_tokens) if token_due_hook is not None else (math.inf, 0.0)


def current_stop_request(*, own_thread: bool = False) -> StopRequest:
    """Return the stop request of the running call; outside of a call, a new stop request.

    A thread that the user's code started gets the request of the only running call, unless `own_thread`.
    """
    scope = _call.get()
    if scope is None and not own_thread and len(_running) == 1:
        scope = next(iter(list(_running)), None)
    return scope.stop if scope is not None else StopRequest()


def scratch() -> Path:
    """Return a local folder that Stoker empties when this call ends."""
    if folder := _current_call_scope().folder:
        return Path(folder)
    return Path(_temporary_folder().name) if _library is _NO_LIBRARY else Path.cwd()


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="stoker-")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the local path of an object. Return any other path unchanged.

    Args:
        path: A cache name or a path.
    """
    given = os.fspath(path)
    return Path(_library.objects.get(given) or given)


def cached_object_name(path: str | os.PathLike[str]) -> str:
    """Return the cache name of the object at `path`; empty if no object has this path."""
    return next((name for name, place in _library.objects.items() if Path(place) == Path(path)), "")


def offer_snapshot(form: str, folder: str | os.PathLike[str], *, made_s: float) -> None:
    if _library.offer is not None:
        _library.offer(form, os.fspath(folder), made_s)


def device_memory_bytes() -> int:
    """Return the declared bytes of memory on each PyTorch device of this library; 0 if undeclared."""
    return bytes_per_torch_device(_library.device_memory_bytes)


def bytes_per_torch_device(device_bytes: int) -> int:
    """Convert bytes per pilot device to bytes per PyTorch device. PyTorch has only one CPU device, `cpu`."""
    names = devices()
    return device_bytes * (len(names) if names[0] == "cpu" else 1)


def enter_library(
    *, device: str | tuple[str, ...] = "cpu", context: Any = None, objects: Mapping[str, str] | None = None,
    offer: SnapshotHook | None = None, device_memory_bytes: int = 0,
) -> None:  # fmt: skip
    """Set the library scope. The library calls this before the loader runs, and again with the loaded context.

    `device`: the pilot's device names (`cuda:3`). `objects`: local paths by cache name or snapshot name; None keeps
    the known paths.
    """
    global _library
    named: list[str] = []
    for one in (device,) if isinstance(device, str) else device or ("cpu",):
        kind = one.partition(":")[0]
        named.append("cpu" if kind == "cpu" else f"{kind}:{sum(n.startswith(kind + ':') for n in named)}")
    known = _library.objects if objects is None else dict(objects)
    _library = _LibraryScope(tuple(named), context, known, offer, device_memory_bytes)


def leave_library() -> None:
    global _library, _latest_call
    _library, _latest_call = _NO_LIBRARY, _NO_CALL
    _running.clear()


def enter_call_scope(
    *, hook: ProgressHook | None = None, folder: str = "", state: bytes = b"", join_gang: JoinGangHook | None = None,
    token_due_hook: TokenDueHook | None = None, stop: StopRequest | None = None,
) -> None:  # fmt: skip
    global _latest_call
    _latest_call = scope = _CallScope(hook, folder, state, join_gang, token_due_hook, stop or StopRequest())
    _running[scope] = None
    _call.set(scope)


def leave_call_scope() -> None:
    global _latest_call
    if (scope := _call.get()) is not None:
        if scope.place is not None:
            scope.place.close()
        _running.pop(scope, None)
        if _latest_call is scope:
            _latest_call = _NO_CALL
        _call.set(None)


def _current_call_scope() -> _CallScope:
    return _call.get() or _latest_call
