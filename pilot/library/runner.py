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
from stoker.contexts.ambient import Evicted, RelayedTexts, StopRequest, is_caused_by_eviction
from stoker.contexts.recipe import ObjectRef
from stoker.errors import GangBroken, StokerError
from stoker.pilot.core import infrastructure
from stoker.pilot.library import failures, pieces
from stoker.pilot.library.call_records import UNKNOWN_OFFSET, CallMarker, LogTail, ThreadTail
from stoker.pilot.library.connection import LibrarySettings
from stoker.pilot.library.failures import summarize_exception
from stoker.pilot.library.functions import CallPickler, RunnableCall, TransferError
from stoker.pilot.library.process import LibraryFault, ProcessGuard, ScratchGuard, SlotFolders, exit_user_forked_child
from stoker.protocol.calls import PIECE_BYTES, CallEnd, CallProgress, Failure, FailureKind, Objective, Payload
from stoker.protocol.ids import CallId
from stoker.units import show_bytes

_LAZY_TYPES = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})
_PARSL_FAILURE_TYPE = "RemoteExceptionWrapper"
"""Class that Parsl's wrapper of a function returns instead of an exception."""
NO_CALL = -1  # the call id while no call runs; ids start at 0
_now = time.perf_counter
_clock_ns = time.monotonic_ns


class Runner:
    def __init__(
        self, settings: LibrarySettings, *, slot: int, marker: CallMarker, workplace: SlotFolders,
        tail: LogTail | ThreadTail,
        context: Any, report: Callable[[CallProgress], None], piece_sender: pieces.PieceSender | None = None,
        meetings: pieces.GangMeetings | None = None, guard: ProcessGuard | None = None,
        exit_process: Callable[[LibraryFault], NoReturn] | None = None,
        resources: failures.LibraryResources | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._pickler = CallPickler(settings)
        self._resources = resources or failures.LibraryResources(settings.folder)
        self._slot = slot
        self._marker = marker
        self._workplace = workplace
        self._tail = tail
        self._context = context
        self._report = report
        self._piece_sender = piece_sender
        self._meetings = meetings
        self._guard = guard
        self._exit_process = exit_process
        self._progress_hook: ambient.ProgressHook = self._report_progress
        self._last_progress = CallProgress(call=0)  # type: ignore[arg-type]
        self._yielding: pieces.YieldingRun | None = None
        self._may_checkpoint = True
        self._log_offset = UNKNOWN_OFFSET
        self._pid = os.getpid()
        self._set_decimal = _decimal_setter()
        self._scratch_guard = ScratchGuard(os.path.dirname(settings.folder))
        self._scratch = workplace.temporary.path
        self.call = NO_CALL
        self.taken_call = NO_CALL  # id of the call in this slot, until its outcome is queued in the outbox
        self.begun_calls = 0  # number of calls begun, counted by the caller of `run`
        self.stop = StopRequest()  # another thread sets this to stop the call
        self.is_clean = True  # False if the last call left files that `remove_left_files` must remove
        self.ended_at = 0.0  # end time of the last call, on `time.perf_counter`

    def take_call(self, call: int) -> None:
        """Record the next call of this slot, so that the call can be stopped."""
        self.stop = StopRequest()
        self.taken_call = call

    def run(self, work: RunnableCall) -> CallEnd | CallProgress:
        """Run a call. Return the outcome, or the checkpoint of an evicted call."""
        spec, packer = work.spec, self._pickler
        call = spec.call
        self._log_offset = self._tail.begin_call()
        self._marker.record_start(self._slot, call, _clock_ns(), self._log_offset)
        self.call = call
        started = _now()
        payload: Payload = b""
        failure: Failure | None = None
        ok, raised = False, ""
        if self._guard is not None:
            self._guard.unchecked_calls += 1
        try:
            self._workplace.enter_call_folder(work.order.options)
            function, takes_context = packer.unpickle_function(work.function)
            args, kwargs = packer.unpickle_arguments(work.function, spec.payload, work.order.objects)
            gang, meetings = work.order.gang, self._meetings
            join_gang = partial(meetings.join_gang, call, gang) if gang is not None and meetings is not None else None
            token_due_hook = _token_due_times(work.order.options.objective, waited_s=work.order.waited_s)
            ambient.enter_call_scope(
                hook=self._progress_hook,
                folder=self._scratch,
                state=spec.progress,
                join_gang=join_gang,
                token_due_hook=token_due_hook,
                stop=self.stop,
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
            if kind in _LAZY_TYPES or work.order.options.stream:
                result = self._await_or_drain_result(run, work, result)
            if os.getpid() != self._pid:
                exit_user_forked_child(None)
            self.ended_at = ended = _now()
            try:
                payload = packer.pickle_result(call, result)
                ok = True
            except TransferError as error:
                failure = error.failure
            # Free a large result before the next call runs.
            del result, args, kwargs
        except BaseException as error:  # including SystemExit and KeyboardInterrupt, which end only the call
            if os.getpid() != self._pid:
                exit_user_forked_child(None if isinstance(error, Evicted) else error)
            self.ended_at = ended = _now()
            if isinstance(error, Evicted) or (self.stop.is_requested and is_caused_by_eviction(error)):
                self._leave_call()
                return self._make_eviction(call, state=error.state if isinstance(error, Evicted) else b"")
            if isinstance(error, TransferError):
                failure = self._find_infrastructure_failure(error) or error.failure
            elif isinstance(error, GangBroken) and work.order.gang is not None:
                failure = self._settings.make_failure(FailureKind.GANG, str(error))
            else:
                self._add_advice(error)
                said = failures.explain_bash_failure(error, log=self._settings.log, log_offset=self._log_offset)
                raised, failure = said or summarize_exception(error), self._find_infrastructure_failure(error)
                payload = packer.pickle_exception(call, error)
                # Clients do not fetch the stored exception of an infrastructure failure, so delete its file.
                if failure is not None and isinstance(payload, ObjectRef):
                    os.unlink(payload.source)
                    payload = b""
        if not ok:
            self._exit_if_damaged()
        run_s, count = ended - started, 0
        if self._yielding is not None:
            run_s, count = max(0.0, run_s - self._yielding.waited_s), self._yielding.count
            if not self._yielding.wait_until_all_taken():
                self._leave_call()
                return self._make_eviction(call)
        printed = self._leave_call()
        work.function.record_run_time(run_s)
        left = None if self.is_clean else self._workplace.describe_left_files(work.function.name)
        return CallEnd(call, ok, payload, run_s, failure, printed, count, raised, left)

    def remove_left_files(self) -> LibraryFault | None:
        self._marker.record_idle(self._slot)  # the clean-up does not count towards the call's time limit
        try:
            self._workplace.remove_left_files()
        except Exception as error:
            code = infrastructure.SCRATCH_FOLDER_GONE if self._scratch_guard.is_gone else infrastructure.CLEANUP_FAILED
            return LibraryFault(code, f"the files that a call left could not be removed: {error}")
        return None

    def _add_advice(self, error: BaseException) -> None:
        with suppress(Exception):  # a user's exception class may reject notes or raise
            if advice := self._workplace.explain_missing_file(error):
                error.add_note(advice)

    def _make_eviction(self, call: CallId, *, state: bytes = b"") -> CallProgress:
        last = self._last_progress if self._last_progress.call == call else CallProgress(call)
        return msgspec.structs.replace(last, state=state)

    # ---- functions that yield

    def _await_or_drain_result(self, run: Callable[..., Any], work: RunnableCall, result: Any) -> Any:
        if type(result) is CoroutineType:
            result = run(pieces.run_in_event_loop, result, self.stop)
        if not work.order.options.stream:
            if not pieces.is_generator(result):
                return result
            self._may_checkpoint = False
            return run(pieces.collect_pieces, result, self.stop)
        if not (hasattr(result, "__next__") or hasattr(result, "__anext__")):
            raise TypeError(
                f"{work.function.name} was called with stream=True and returned a"
                f" {type(result).__name__}: yield the pieces, or return an iterator over them"
            )
        if self._piece_sender is None:
            raise TypeError(f"{work.function.name} yields its result in pieces, which this program does not support")
        began_ns, call = _clock_ns(), work.spec.call
        self._last_progress = CallProgress(call)
        self._yielding = self._piece_sender.begin_run(
            call,
            must_end=lambda: self.stop.is_requested,
            on_waited=lambda s: self._marker.record_start(  # the wait does not count towards the time limit
                self._slot, call, began_ns + int(s * 1e9), self._log_offset
            ),
        )
        self._may_checkpoint = False
        if not run(pieces.pass_pieces, result, self._send_piece, self.stop):
            raise Evicted
        return None

    def _send_piece(self, piece: Any) -> bool:
        if os.getpid() != self._pid:
            exit_user_forked_child(None)
        yielding = self._yielding
        if yielding is None:
            return False
        if isinstance(piece, RelayedTexts):
            with closing(piece.send_to(yielding)) as texts:
                return all(map(self._send_piece, texts))
        parts = self._pickler.pickle_parts(piece, what="piece")
        size = sum(map(len, parts))
        if size > PIECE_BYTES:
            raise self._pickler.make_error(
                f"piece {yielding.count}, a {type(piece).__name__}, has {show_bytes(size)} when it is pickled, and"
                f" no piece may have more than {show_bytes(PIECE_BYTES)}: yield smaller pieces, or return one result"
            )
        return yielding.send_piece(parts[0] if len(parts) == 1 and type(parts[0]) is bytes else b"".join(parts))

    def _exit_if_damaged(self) -> None:
        if self._scratch_guard.is_gone:
            os._exit(infrastructure.SCRATCH_FOLDER_GONE)  # the agent returns all calls of this library to the manager
        if self._guard is not None and self._exit_process is not None and self._guard.unchecked_calls > 1:
            fault = self._guard.find_damage()
            if fault is not None:
                self._exit_process(fault)

    def record_suspects(self, calls: list[int]) -> None:
        """Record calls that have ended and may have damaged this process, which is about to exit."""
        self._marker.record_suspects(calls)

    def mark_idle(self) -> None:
        """Mark this slot as idle, so that its call is not blamed for the library's exit."""
        self._marker.record_idle(self._slot)

    def _leave_call(self) -> Any:
        ambient.leave_call_scope()
        if self._meetings is not None:
            self._meetings.forget_call(self.call)
        if self._yielding is not None and self._piece_sender is not None:
            self._piece_sender.end_run(self._yielding)
            self._yielding = None
        self._may_checkpoint = True
        self.call = NO_CALL
        self.is_clean = self._workplace.is_clean()
        return self._tail.take_output()

    def _find_infrastructure_failure(self, error: BaseException) -> Failure | None:
        try:
            found = failures.find_infrastructure_cause(error, self._resources)
        except Exception:  # a failed check must not hide the user's exception
            found = None
        if found is None:
            return None
        failure = self._settings.make_failure(FailureKind.INFRASTRUCTURE, found.text)
        return msgspec.structs.replace(
            failure, device=", ".join(self._resources.devices) if found.symptom.probed else ""
        )

    def _report_progress(self, done: float, total: float, metric: float, state: bytes) -> bool:
        if os.getpid() != self._pid:  # a forked process reports no progress
            return False
        if state and not self._may_checkpoint:
            raise StokerError(
                "stoker.progress(state=...) in a function that yields: the call restarts with its first piece,"
                " and cannot use a checkpoint; leave state out"
            )
        self._last_progress = CallProgress(
            self.call, done=done, total=total, metric=metric, state=state  # type: ignore[arg-type]
        )  # fmt: skip
        if self.call != NO_CALL:
            self._report(self._last_progress)
        return self.stop.is_requested


def _decimal_setter() -> Callable[[], None] | None:
    """Return a function that gives a call a copy of the loader's decimal context; None if the loader set none."""
    for variable, value in contextvars.copy_context().items():
        if variable.name == "decimal_context":
            import decimal

            kept = value.copy()
            return lambda: decimal.setcontext(kept.copy())
    return None


def _token_due_times(objective: Objective, *, waited_s: float) -> ambient.TokenDueHook | None:
    """Return a function that computes the due times of tokens; None without an objective for the first token."""
    if not (objective.ttft_s or objective.ttft_per_token_s):
        return None
    since = time.monotonic() - waited_s

    def token_due_hook(prompt_tokens: int) -> tuple[float, float]:
        first_s = objective.first_token_s(prompt_tokens)
        return since + first_s if first_s else math.inf, objective.tpot_s

    return token_due_hook
