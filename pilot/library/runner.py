"""One slot of a library. It runs one call after another, and returns how each ended.

This is the hot path: a call that does nothing should cost its library a few tens of microseconds. So the code makes no
system call twice for the same answer, and rare paths have functions of their own.
"""

from __future__ import annotations

import contextvars
import mmap
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

import msgspec

from stoker.contexts import ambient, payloads
from stoker.contexts.ranks import SeatHook
from stoker.contexts.recipe import ObjectRef
from stoker.errors import GangBroken, SerializationError, StokerError
from stoker.manager.protocol.calls import (
    INLINE_LIMIT_BYTES,
    PIECE_BYTES,
    CallEnd,
    CallProgress,
    CallSpec,
    Failure,
    FailureKind,
    GangPlace,
    Payload,
)
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_library import Run
from stoker.pilot.core import exits
from stoker.pilot.library import evidence
from stoker.pilot.library.functions import Function
from stoker.pilot.library.lane import PieceLane, YieldingRun
from stoker.pilot.library.marker import Marker
from stoker.pilot.library.meetings import GangMeetings
from stoker.pilot.library.printing import LogTail, ThreadTail
from stoker.pilot.library.sandbox import Sandbox, ScratchGuard
from stoker.pilot.library.settings import Settings
from stoker.pilot.library.soundness import LibraryFault, Soundness, out_of_descriptors
from stoker.pilot.library.yielding import as_list, can_be_drained, drain, yields
from stoker.units import show_bytes

_LAZY = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})
"""What a function returns that has not done its work yet."""
_SMALL = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict, complex})
_TEXT_MOST = 40_000
NO_CALL = -1
"""Stands for a call's id while no call runs; ids count from 0."""
_now = time.perf_counter
_clock_ns = time.monotonic_ns


class RunnableCall(msgspec.Struct, frozen=True):
    """A call, with the order that its frame holds for all its calls, and its function."""

    spec: CallSpec
    run: Run
    function: Function


class Runner:
    """One slot. `context` is the first argument of functions that take one; `report` sends a call's progress; `leave`
    ends the library for a fault that `soundness` finds; `place` is what exceptions are judged by."""

    def __init__(
        self,
        settings: Settings,
        *,
        slot: int,
        marker: Marker,
        sandbox: Sandbox,
        tail: LogTail | ThreadTail,
        context: Any,
        report: Callable[[CallProgress], None],
        lane: PieceLane | None = None,
        meetings: GangMeetings | None = None,
        soundness: Soundness | None = None,
        leave: Callable[[LibraryFault], NoReturn] | None = None,
        place: evidence.Place | None = None,
    ) -> None:
        self._settings = settings
        self._place = place or evidence.Place(settings.folder)
        self._slot = slot
        self._marker = marker
        self._sandbox = sandbox
        self._tail = tail
        self._context = context
        self._report = report
        self._lane = lane
        self._meetings = meetings
        self._soundness = soundness
        self._leave = leave
        self._hook: ambient.ProgressHook = self._progress
        self._last = CallProgress(call=0)  # type: ignore[arg-type]
        self._yielding: YieldingRun | None = None
        """The call that runs, if it gives its result in pieces."""
        self._may_checkpoint = True
        self._pid = os.getpid()
        self._set_decimal = _decimal_setter()
        self._ground = ScratchGuard(os.path.dirname(settings.folder))
        self.call = NO_CALL
        """The id of the call that runs."""
        self.begun = 0
        """How many calls have begun, counted by the caller of `run`. A watcher compares it between two looks."""
        self.evict = False
        """Another thread sets it to end the call at its next progress report."""
        self.forked = False
        """True in a forked child of this process, which must end and never go on as the library."""
        self.ended_at = 0.0
        """When the last call ended, on `time.perf_counter`."""

    def run(self, work: RunnableCall) -> CallEnd | CallProgress:
        """Run a call. Returns how it ended, or its checkpoint if it was evicted."""
        spec = work.spec
        call = spec.call
        self._marker.begin(self._slot, call, _clock_ns())
        self.evict = False
        self.call = call
        self._tail.begin()
        started = _now()
        payload: Payload = b""
        failure: Failure | None = None
        ok = lacked_descriptors = False
        if self._soundness is not None:
            self._soundness.unchecked += 1
        try:
            if work.run.options.folder:
                self._sandbox.visit(work.run.options.folder)
            function, takes_context = self._open_function(work)
            args, kwargs = self._open_arguments(spec, work)
            seat = self._seat(call, work.run.gang) if work.run.gang is not None else None
            ambient.enter_call(hook=self._hook, folder=self._sandbox.path, state=spec.progress, seat=seat)
            started = _now()
            run = contextvars.copy_context().run  # a call's context variables (decimal, numpy, the user's) are its own
            if self._set_decimal is not None:
                run(self._set_decimal)
            if takes_context:
                result = run(function, self._context, *args, **kwargs)
            else:
                result = run(function, *args, **kwargs)
            if type(result) in _LAZY or work.run.options.stream:
                result = self._result_of(run, work, result)
            if os.getpid() != self._pid:
                leave_child(None)
            self.ended_at = ended = _now()
            try:
                payload = self._pack(call, result)
                ok = True
            except _TransferError as error:
                failure, lacked_descriptors = error.failure, out_of_descriptors(error)
            # Free a large result before the next call runs.
            del result, args, kwargs
        except _TransferError as error:
            self.ended_at = ended = _now()
            failure, lacked_descriptors = self._infrastructure(error) or error.failure, out_of_descriptors(error)
        except ambient.Evicted as evicted:
            self.ended_at = _now()
            self._finish()
            return self._evicted(call, state=evicted.state)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: a function ends, not its library
            if os.getpid() != self._pid:
                leave_child(error)
            self.ended_at = ended = _now()
            if isinstance(error, GangBroken) and work.run.gang is not None:
                failure = self._failure(str(error), kind=FailureKind.GANG)
            else:
                lacked_descriptors = out_of_descriptors(error)
                failure = self._infrastructure(error)
                payload = self._pack_error(call, error)
                if failure is not None and isinstance(payload, ObjectRef):  # nobody would fetch it
                    os.unlink(payload.source)
                    payload = b""
        if self.forked:
            _leave_fork()
        if not ok:
            self._leave_if_unsound(lacked_descriptors=lacked_descriptors)
        run_s, pieces = ended - started, 0
        if self._yielding is not None:
            run_s, pieces = max(0.0, run_s - self._yielding.waited_s), self._yielding.count
            if not self._yielding.wait_taken():
                self._finish()
                return self._evicted(call)
        printed = self._finish()
        work.function.took(run_s)
        return CallEnd(call, ok, payload, run_s, failure, printed, pieces)

    def _evicted(self, call: CallId, *, state: bytes = b"") -> CallProgress:
        return msgspec.structs.replace(self._last, call=call, state=state)

    # ---- functions that yield

    def _result_of(self, run: Callable[..., Any], work: RunnableCall, result: Any) -> Any:
        """The value of a coroutine; None for what is sent in pieces; else a list of what a generator yields."""
        if type(result) is CoroutineType:  # an `async def` function
            result = run(_in_an_event_loop, result)
        if not work.run.options.stream:
            return run(self._as_list, result) if yields(result) else result
        if not can_be_drained(result):
            raise TypeError(
                f"{work.function.name} was called for its pieces (stream=True) and returned a"
                f" {type(result).__name__}: yield the pieces, or return an iterator over them"
            )
        if self._lane is None:
            raise TypeError(f"{work.function.name} gives its result in pieces, which no one takes here")
        began_ns, call = _clock_ns(), work.spec.call
        self._last = CallProgress(call)
        self._yielding = self._lane.begin(
            call,
            is_to_end=lambda: self.evict,
            on_waited=lambda s: self._marker.begin(self._slot, call, began_ns + int(s * 1e9)),  # its limit waits too
        )
        self._may_checkpoint = False
        if not run(drain, result, self._put):
            raise ambient.Evicted
        return None

    def _as_list(self, result: Any) -> list[Any]:
        self._may_checkpoint = False
        return as_list(result)

    def _put(self, piece: Any) -> bool:
        """Send a piece of the running call. False if nobody wants more of them."""
        if os.getpid() != self._pid:
            leave_child(None)
        yielding = self._yielding
        if yielding is None:
            return False
        parts = self._parts(piece, what="piece")
        size = sum(map(len, parts))
        if size > PIECE_BYTES:
            raise _TransferError(
                self._failure(
                    f"piece {yielding.count}, a {type(piece).__name__}, has {show_bytes(size)} when it is pickled, and"
                    f" no piece may have more than {show_bytes(PIECE_BYTES)}: yield smaller ones, or return one result"
                )
            )
        return yielding.put(parts[0] if len(parts) == 1 and type(parts[0]) is bytes else b"".join(parts))

    def _leave_if_unsound(self, *, lacked_descriptors: bool) -> None:
        """End the library if the pilot or an earlier call may have made this call fail; the call runs elsewhere."""
        if self._ground.is_gone:
            os._exit(exits.FOLDER_GONE)  # the agent has every call of this library run elsewhere
        soundness = self._soundness
        if soundness is None or self._leave is None:
            return
        fault = soundness.why_no_descriptors() if lacked_descriptors else None
        if fault is None and soundness.unchecked > 1:
            fault = soundness.fault()
            if fault is not None and fault.code == exits.NO_DESCRIPTORS and not lacked_descriptors:
                return
        if fault is not None:
            self._leave(fault)

    def suspect(self, calls: list[int]) -> None:
        """Note ended calls that may have damaged this process, before it ends."""
        self._marker.suspect(calls)

    def forgive(self) -> None:
        """Count a running call as not begun: its library ends for another reason."""
        self._marker.idle(self._slot)

    def _seat(self, call: CallId, place: GangPlace) -> SeatHook | None:
        meetings = self._meetings
        return None if meetings is None else lambda limit_s: meetings.seat(call, place, limit_s=limit_s)

    def _finish(self) -> Any:
        ambient.leave_call()
        if self._meetings is not None:
            self._meetings.over(self.call)
        if self._yielding is not None and self._lane is not None:
            self._lane.over(self._yielding)
            self._yielding = None
        self._may_checkpoint = True
        self.call = NO_CALL
        printed = self._tail.take()
        self._sandbox.restore()
        return printed

    def _open_function(self, work: RunnableCall) -> tuple[Callable[..., Any], bool]:
        try:
            return work.function.open()
        except BaseException as error:
            raise _TransferError(
                self._failure(
                    f"the function {work.function.name} could not be unpickled on {self._settings.pilot}:"
                    f" {type(error).__name__}: {error}; what it imports must be installed there"
                )
            ) from error

    def _open_arguments(self, spec: CallSpec, work: RunnableCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            data: Any = spec.payload
            if isinstance(data, ObjectRef):
                data = _map(work.run.objects.get(data.name) or data.source)
            args, kwargs = work.function.open_arguments(data)
        except BaseException as error:
            raise _TransferError(
                self._failure(
                    f"the arguments of {work.function.name} could not be unpickled on {self._settings.pilot}:"
                    f" {type(error).__name__}: {error}"
                )
            ) from error
        return args, kwargs

    def _parts(self, value: Any, *, what: str) -> list[Any]:
        """A result or a piece of one, pickled."""
        try:
            if type(value) in _SMALL:
                return [payloads.dumps(value, what=what)]
            return payloads.dump_parts(value, what=what)
        except SerializationError as error:
            raise _TransferError(self._failure(str(error))) from error
        except BaseException as error:
            text = f"the {what}, a {type(value).__name__}, could not be pickled: {type(error).__name__}: {error}"
            raise _TransferError(self._failure(text)) from error

    def _pack(self, call: int, result: Any) -> Payload:
        parts = self._parts(result, what="result")
        if len(parts) == 1 and len(parts[0]) <= INLINE_LIMIT_BYTES:
            return parts[0] if type(parts[0]) is bytes else bytes(parts[0])
        if sum(map(len, parts)) <= INLINE_LIMIT_BYTES:
            return b"".join(parts)
        return self._store(call, parts)

    def _pack_error(self, call: int, error: BaseException) -> Payload:
        if error.__traceback__ is not None:  # from the user's own frame on
            error.__traceback__ = error.__traceback__.tb_next
        data = payloads.dump_exception(error)
        error.__traceback__ = None  # frames hold the arguments alive
        if len(data) <= INLINE_LIMIT_BYTES:
            return data
        try:
            return self._store(call, [data])
        except _TransferError:
            return payloads.dump_exception(SerializationError(f"{type(error).__name__} of {len(data)} bytes was lost"))

    def _infrastructure(self, error: BaseException) -> Failure | None:
        """What the infrastructure did to a call that raised this; None if the exception is the user's own."""
        found = evidence.find(error, self._place)
        if found is None:
            return None
        failure = self._failure(found.text, kind=FailureKind.INFRASTRUCTURE)
        failed = ", ".join(self._place.devices) if found.row.probed else ""
        return msgspec.structs.replace(failure, device=failed) if failed else failure

    def _store(self, call: int, parts: list[Any]) -> ObjectRef:
        size = sum(map(len, parts))
        name = f"result-{call:x}-{uuid.uuid4().hex[:12]}"
        path = Path(self._settings.objects) / name
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
                for part in parts:
                    rest = memoryview(part)
                    while rest:
                        rest = rest[file.write(rest) :]
        except OSError as error:
            path.unlink(missing_ok=True)
            text = f"a result of {size} bytes could not be written to {path}: {error}; make room there and run it again"
            raise _TransferError(self._failure(text)) from error
        return ObjectRef(name=name, size_bytes=size, source=str(path))

    def _failure(self, message: str, *, kind: FailureKind = FailureKind.SERIALIZATION) -> Failure:
        return Failure(
            kind=kind,
            message=clean(message),
            pilot=self._settings.pilot,
            library=self._settings.library,
            log=self._settings.log,
        )

    def _progress(self, done: float, total: float, metric: float, state: bytes) -> bool:
        if state and not self._may_checkpoint:
            raise StokerError(
                "stoker.progress(state=...) in a function that yields: such a call begins again with its first piece,"
                " and has no use for a checkpoint; leave state out"
            )
        self._last = CallProgress(call=self.call, done=done, total=total, metric=metric, state=state)  # type: ignore[arg-type]
        if self.call != NO_CALL:
            self._report(self._last)
        return self.evict


class _TransferError(Exception):
    """The function or arguments of a call could not be unpickled here, or its result could not be sent."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _decimal_setter() -> Callable[[], None] | None:
    """A function that gives a call the loader's decimal context; None if the loader set none. Each call needs a copy of
    its own, because copied context variables share the object."""
    for variable, value in contextvars.copy_context().items():
        if variable.name == "decimal_context":
            import decimal  # the loader has imported it

            kept = value.copy()
            return lambda: decimal.setcontext(kept.copy())
    return None


def _in_an_event_loop(coroutine: CoroutineType[Any, Any, Any]) -> Any:
    """Run the coroutine of an `async def` function in an event loop of its own."""
    import asyncio  # takes 50 ms, which libraries without coroutines save

    return asyncio.run(coroutine)


def _leave_fork() -> None:
    """End a forked child that has returned from the user's function, without the parent's exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(0)


def leave_child(error: BaseException | None) -> NoReturn:
    """End a child that user code forked and did not end: only the library itself reports a call's end."""
    code = error.code if isinstance(error, SystemExit) else error
    try:
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _map(path: str) -> memoryview:
    """Map a file's bytes into memory. Writes change the mapping alone, and pages are read on first use."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(bytearray())
        return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def clean(text: str) -> str:
    """Make a user's text fit for a frame: valid UTF-8, and its middle left out if it is long."""
    if len(text) > _TEXT_MOST:
        text = f"{text[: _TEXT_MOST // 2]} … {len(text) - _TEXT_MOST:,} characters … {text[-_TEXT_MOST // 2 :]}"
    return text.encode("utf-8", "replace").decode()
