"""One slot of a library, which runs calls one after the other. An empty call takes some tens of microseconds."""

from __future__ import annotations

import contextvars
import math
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

import msgspec

from stoker.contexts import ambient
from stoker.contexts.ambient import CallStop, Evicted, RelayedTexts, is_caused_by_eviction
from stoker.contexts.recipe import ObjectRef
from stoker.errors import GangBroken, StokerError
from stoker.pilot.core import infrastructure
from stoker.pilot.library import failures, pieces
from stoker.pilot.library.call_records import NOWHERE, LogTail, Marker, ThreadTail
from stoker.pilot.library.connection import Settings
from stoker.pilot.library.failures import in_short
from stoker.pilot.library.functions import Packer, RunnableCall, TransferError
from stoker.pilot.library.process import LibraryFault, ProcessGuard, ScratchGuard, SlotFolders, exit_user_forked_child
from stoker.protocol.calls import PIECE_BYTES, CallEnd, CallProgress, Failure, FailureKind, Objective, Payload
from stoker.protocol.ids import CallId
from stoker.units import show_bytes

_LAZY = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})
_PARSL_FAILURE_TYPE = "RemoteExceptionWrapper"
"""Class that Parsl's wrapper of a function returns instead of an exception."""
NO_CALL = -1  # the call id while no call runs; ids start at 0
_now = time.perf_counter
_clock_ns = time.monotonic_ns


class Runner:
    def __init__(
        self, settings: Settings, *, slot: int, marker: Marker, workplace: SlotFolders, tail: LogTail | ThreadTail,
        context: Any, report: Callable[[CallProgress], None], lane: pieces.PieceSender | None = None,
        meetings: pieces.GangMeetings | None = None, guard: ProcessGuard | None = None,
        leave: Callable[[LibraryFault], NoReturn] | None = None, place: failures.Place | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._packer = Packer(settings)
        self._place = place or failures.Place(settings.folder)
        self._slot = slot
        self._marker = marker
        self._workplace = workplace
        self._tail = tail
        self._context = context
        self._report = report
        self._lane = lane
        self._meetings = meetings
        self._guard = guard
        self._leave = leave
        self._hook: ambient.ProgressHook = self._progress
        self._last = CallProgress(call=0)  # type: ignore[arg-type]
        self._yielding: pieces.YieldingRun | None = None
        self._may_checkpoint = True
        self._log_from = NOWHERE
        self._pid = os.getpid()
        self._set_decimal = _decimal_setter()
        self._scratch_guard = ScratchGuard(os.path.dirname(settings.folder))
        self._scratch = workplace.temporary.path
        self.call = NO_CALL
        self.taken = NO_CALL  # id of the call in this slot, until its outcome is queued in the outbox
        self.begun = 0  # number of calls begun, counted by the caller of `run`
        self.stop = CallStop()  # another thread sets this to stop the call
        self.is_clean = True  # False if the last call left files that `clean` must remove
        self.ended_at = 0.0  # end time of the last call, on `time.perf_counter`

    def take(self, call: int) -> None:
        """Record the next call of this slot, so that the call can be stopped."""
        self.stop = CallStop()
        self.taken = call

    def run(self, work: RunnableCall) -> CallEnd | CallProgress:
        """Run a call. Return the outcome, or the checkpoint of an evicted call."""
        spec, packer = work.spec, self._packer
        call = spec.call
        self._log_from = self._tail.begin()
        self._marker.begin(self._slot, call, _clock_ns(), self._log_from)
        self.call = call
        started = _now()
        payload: Payload = b""
        failure: Failure | None = None
        ok, raised = False, ""
        if self._guard is not None:
            self._guard.unchecked += 1
        try:
            self._workplace.enter(work.run.options)
            function, takes_context = packer.open_function(work.function)
            args, kwargs = packer.open_arguments(work.function, spec.payload, work.run.objects)
            gang, meetings = work.run.gang, self._meetings
            seat = partial(meetings.seat, call, gang) if gang is not None and meetings is not None else None
            dues = _token_due_times(work.run.options.objective, waited_s=work.run.waited_s)
            ambient.enter_call_scope(
                hook=self._hook, folder=self._scratch, state=spec.progress, seat=seat, dues=dues, stop=self.stop
            )
            started = _now()
            run = contextvars.copy_context().run  # separate context variables per call (decimal, numpy)
            if self._set_decimal is not None:
                run(self._set_decimal)
            if takes_context:
                result = run(function, self._context, *args, **kwargs)
            else:
                result = run(function, *args, **kwargs)
            if (kind := type(result)).__name__ == _PARSL_FAILURE_TYPE and kind.__module__.startswith("parsl."):
                raise result.e_value
            if kind in _LAZY or work.run.options.stream:
                result = self._await_or_drain_result(run, work, result)
            if os.getpid() != self._pid:
                exit_user_forked_child(None)
            self.ended_at = ended = _now()
            try:
                payload = packer.pack(call, result)
                ok = True
            except TransferError as error:
                failure = error.failure
            # Free a large result before the next call runs.
            del result, args, kwargs
        except BaseException as error:  # including SystemExit and KeyboardInterrupt, which end only the function
            if os.getpid() != self._pid:
                exit_user_forked_child(None if isinstance(error, Evicted) else error)
            self.ended_at = ended = _now()
            if isinstance(error, Evicted) or (self.stop.asked and is_caused_by_eviction(error)):
                self._finish()
                return self._evicted(call, state=error.state if isinstance(error, Evicted) else b"")
            if isinstance(error, TransferError):
                failure = self._find_infrastructure_failure(error) or error.failure
            elif isinstance(error, GangBroken) and work.run.gang is not None:
                failure = self._settings.failure(FailureKind.GANG, str(error))
            else:
                self._advise(error)
                said = failures.explain_bash_failure(error, log=self._settings.log, log_from=self._log_from)
                raised, failure = said or in_short(error), self._find_infrastructure_failure(error)
                payload = packer.pack_error(call, error)
                if failure is not None and isinstance(payload, ObjectRef):  # no client would fetch the exception
                    os.unlink(payload.source)
                    payload = b""
        if not ok:
            self._exit_if_damaged()
        run_s, count = ended - started, 0
        if self._yielding is not None:
            run_s, count = max(0.0, run_s - self._yielding.waited_s), self._yielding.count
            if not self._yielding.wait_until_all_pieces_taken():
                self._finish()
                return self._evicted(call)
        printed = self._finish()
        work.function.took(run_s)
        left = None if self.is_clean else self._workplace.left(work.function.name)
        return CallEnd(call, ok, payload, run_s, failure, printed, count, raised, left)

    def clean(self) -> LibraryFault | None:
        self._marker.idle(self._slot)  # the time limit of the call no longer counts
        try:
            self._workplace.clean()
        except Exception as error:
            code = infrastructure.FOLDER_GONE if self._scratch_guard.is_gone else infrastructure.NOT_CLEARED
            return LibraryFault(code, f"the files that a call left could not be removed: {error}")
        return None

    def _advise(self, error: BaseException) -> None:
        with suppress(Exception):  # a user's exception class may reject notes or raise
            if advice := self._workplace.advice(error):
                error.add_note(advice)

    def _evicted(self, call: CallId, *, state: bytes = b"") -> CallProgress:
        last = self._last if self._last.call == call else CallProgress(call)
        return msgspec.structs.replace(last, state=state)

    # ---- functions that yield

    def _await_or_drain_result(self, run: Callable[..., Any], work: RunnableCall, result: Any) -> Any:
        if type(result) is CoroutineType:
            result = run(pieces.run_in_event_loop, result, self.stop)
        if not work.run.options.stream:
            if not pieces.yields(result):
                return result
            self._may_checkpoint = False
            return run(pieces.as_list, result, self.stop)
        if not (hasattr(result, "__next__") or hasattr(result, "__anext__")):
            raise TypeError(
                f"{work.function.name} was called with stream=True and returned a"
                f" {type(result).__name__}: yield the pieces, or return an iterator over them"
            )
        if self._lane is None:
            raise TypeError(f"{work.function.name} yields its result in pieces, which this program does not support")
        began_ns, call = _clock_ns(), work.spec.call
        self._last = CallProgress(call)
        self._yielding = self._lane.begin(
            call,
            is_to_end=lambda: self.stop.asked,
            on_waited=lambda s: self._marker.begin(  # the wait does not count towards the time limit
                self._slot, call, began_ns + int(s * 1e9), self._log_from
            ),
        )
        self._may_checkpoint = False
        if not run(pieces.drain, result, self._put, self.stop):
            raise Evicted
        return None

    def _put(self, piece: Any) -> bool:
        if os.getpid() != self._pid:
            exit_user_forked_child(None)
        yielding = self._yielding
        if yielding is None:
            return False
        if isinstance(piece, RelayedTexts):
            with closing(piece.send_to(yielding)) as texts:
                return all(map(self._put, texts))
        parts = self._packer.parts(piece, what="piece")
        size = sum(map(len, parts))
        if size > PIECE_BYTES:
            raise self._packer.error(
                f"piece {yielding.count}, a {type(piece).__name__}, has {show_bytes(size)} when it is pickled, and"
                f" no piece may have more than {show_bytes(PIECE_BYTES)}: yield smaller pieces, or return one result"
            )
        return yielding.put(parts[0] if len(parts) == 1 and type(parts[0]) is bytes else b"".join(parts))

    def _exit_if_damaged(self) -> None:
        if self._scratch_guard.is_gone:
            os._exit(infrastructure.FOLDER_GONE)  # the agent returns all calls of this library to the manager
        if self._guard is not None and self._leave is not None and self._guard.unchecked > 1:
            fault = self._guard.damage()
            if fault is not None:
                self._leave(fault)

    def suspect(self, calls: list[int]) -> None:
        """Record calls that have ended and may have damaged this process, which exits next."""
        self._marker.suspect(calls)

    def forgive(self) -> None:
        """Mark this slot as idle, because its call is not the reason for the library's exit."""
        self._marker.idle(self._slot)

    def _finish(self) -> Any:
        ambient.leave_call_scope()
        if self._meetings is not None:
            self._meetings.over(self.call)
        if self._yielding is not None and self._lane is not None:
            self._lane.over(self._yielding)
            self._yielding = None
        self._may_checkpoint = True
        self.call = NO_CALL
        self.is_clean = self._workplace.is_clean()
        return self._tail.take()

    def _find_infrastructure_failure(self, error: BaseException) -> Failure | None:
        try:
            found = failures.find_infrastructure_cause(error, self._place)
        except Exception:  # a failed check must not hide the user's exception
            found = None
        if found is None:
            return None
        failure = self._settings.failure(FailureKind.INFRASTRUCTURE, found.text)
        return msgspec.structs.replace(failure, device=", ".join(self._place.devices) if found.row.probed else "")

    def _progress(self, done: float, total: float, metric: float, state: bytes) -> bool:
        if os.getpid() != self._pid:  # a forked process reports no progress
            return False
        if state and not self._may_checkpoint:
            raise StokerError(
                "stoker.progress(state=...) in a function that yields: the call restarts with its first piece,"
                " and cannot use a checkpoint; leave state out"
            )
        self._last = CallProgress(call=self.call, done=done, total=total, metric=metric, state=state)  # type: ignore[arg-type]
        if self.call != NO_CALL:
            self._report(self._last)
        return self.stop.asked


def _decimal_setter() -> Callable[[], None] | None:
    """Return a function that gives a call a copy of the loader's decimal context; None without such a context."""
    for variable, value in contextvars.copy_context().items():
        if variable.name == "decimal_context":
            import decimal

            kept = value.copy()
            return lambda: decimal.setcontext(kept.copy())
    return None


def _token_due_times(objective: Objective, *, waited_s: float) -> ambient.TokenDues | None:
    """Return a function that computes the due times of tokens; None without an objective for the first token."""
    if not (objective.ttft_s or objective.ttft_per_token_s):
        return None
    since = time.monotonic() - waited_s

    def dues(prompt_tokens: int) -> tuple[float, float]:
        first_s = objective.first_token_s(prompt_tokens)
        return since + first_s if first_s else math.inf, objective.tpot_s

    return dues
