"""One submitted job: its state in the session, and its results in the run folder.

If the policy does not forecast the end of calls, the end is extrapolated from the iterations so far.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.apps.common.command_line import format_count
from stoker.apps.prompt_tuning.board import CHECKPOINT, BoardEntry, JobPhase, write_entry
from stoker.apps.prompt_tuning.submit import CheckedJob, make_tuning_call
from stoker.errors import CallDroppedError, SessionError, StokerError
from stoker.run_folder import RunFolder, write_whole
from stoker.sessions import (
    CallProgress,
    Clock,
    ContextStatus,
    ListedCall,
    ListedState,
    Observer,
    checkpoint_of,
    observe,
    sent_call,
)
from stoker.tuning import Saved, Tuned, pack, unpack, write_tuned

if TYPE_CHECKING:
    from stoker.sessions import AppCallFuture, CallFuture, Session

_MOST_CALLS = 1000
_LEAST_ITERATIONS = 10
"""Number of iterations on the current devices after which the measured pace predicts the job's end."""


class SessionPicture(msgspec.Struct, frozen=True):
    calls: tuple[ListedCall, ...] = ()
    contexts: tuple[ContextStatus, ...] = ()
    loading_on: dict[str, tuple[str, ...]] = {}
    """Devices on which a context loads, by the name of the context."""

    def count_calls_ahead(self, call: ListedCall) -> int:
        """Return the number of waiting calls of the same context before this call."""
        same = [one.call for one in self.calls if one.state is ListedState.WAITING and one.context == call.context]
        return same.index(call.call) if call.call in same else 0


class SessionReader:
    """Reads the state of a session. After a failure, the next read opens a new connection."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._observer: Observer | None = None

    def read_picture(self) -> SessionPicture | None:
        try:
            if self._observer is None:
                self._observer = observe(self._session).__enter__()
            status = self._observer.status()
            calls = self._observer.calls(limit=_MOST_CALLS, only=None).calls
        except SessionError:
            self.close()
            return None
        loading: dict[str, tuple[str, ...]] = {}
        for library in status.libraries:
            if library.state == "loading":
                loading[library.recipe] = (*loading.get(library.recipe, ()), *library.devices)
        return SessionPicture(calls, status.contexts, loading)

    def close(self) -> None:
        if self._observer is not None:
            with contextlib.suppress(SessionError):
                self._observer.close()
            self._observer = None


def read_saved_state(progress: CallProgress | None) -> Saved | None:
    """Return the last state in a call's progress reports, from which the call can resume."""
    return unpack(checkpoint_of(progress) or b"")


def update_entry(
    entry: BoardEntry, *, call: CallFuture | None, picture: SessionPicture | None, now: float, ahead_s: float = 0.0
) -> BoardEntry:  # fmt: skip
    """Return the updated `entry`. `now`: seconds since the epoch; `ahead_s`: seconds by which `now` is ahead of the
    wall clock.
    """
    if call is None:
        return entry
    entry = copy.copy(entry)
    entry.call = call.parsl_executor_task_id
    if picture is not None:
        listed = next((one for one in picture.calls if one.call == entry.call), None)
        if listed is not None and listed.state is not ListedState.FAILED:
            _update_from_listed_call(entry, listed, picture, now)
    if call.forecast is not None and math.isfinite(call.forecast.ends_at):  # an infinite time: the end is unknown
        entry.ends_at = call.forecast.ends_at + ahead_s
    if call.progress is not None:
        _update_from_progress(entry, call.progress, now)
    in_time = entry.meets_deadline(now)
    if in_time or (in_time is False and entry.missed_since is None):
        entry.missed_since = None if in_time else now
    return entry


def _update_from_listed_call(entry: BoardEntry, listed: ListedCall, picture: SessionPicture, now: float) -> None:
    if entry.devices and entry.devices != listed.where:  # the call has lost a device or was preempted
        entry.devices, entry.restarts, entry.seen_at = (), entry.restarts + 1, None
    context = next((one for one in picture.contexts if one.name == listed.context), None)
    loads_on = picture.loading_on.get(listed.context, ()) if context is not None and not context.hot else ()
    if listed.state is ListedState.RUNNING:
        since = now - listed.since_s
        _end_loading(entry, since)
        entry.phase, entry.devices, entry.why = JobPhase.TUNING, listed.where, ""
        entry.started_at = since if entry.started_at is None else entry.started_at
    elif loads_on:
        entry.phase, entry.why = JobPhase.LOADING, f"its model loads on {', '.join(loads_on)}"
        entry.loading_at = now if entry.loading_at is None else entry.loading_at
    else:
        _end_loading(entry, now)
        entry.phase, entry.why = JobPhase.QUEUED, _explain_wait(listed, context, picture)


def _end_loading(entry: BoardEntry, at: float) -> None:
    """Record the end of the model's load, and count the time as loading time."""
    if entry.loading_at is not None and entry.started_at is None:
        entry.loading_s += max(0.0, at - entry.loading_at)
    entry.loading_at = None


def _explain_wait(listed: ListedCall, context: ContextStatus | None, picture: SessionPicture) -> str:
    if ahead := picture.count_calls_ahead(listed):
        return f"{format_count(ahead, 'job')} before it"
    if context is not None and context.hot:
        if context.running >= context.hot:
            return "its hot device is busy" if context.hot == 1 else f"its {context.hot} hot devices are busy"
        others = "the devices are kept for a job with an earlier deadline"
        return others if context.queued > 1 else "waiting for devices to be assigned"
    return context.waits_for if context is not None else ""


def _update_from_progress(entry: BoardEntry, progress: CallProgress, now: float) -> None:
    saved, done, before = read_saved_state(progress), int(progress.done), entry.iteration
    entry.iterations = int(progress.total) or entry.iterations
    entry.loss = progress.metric or entry.loss  # keep the last loss while a restarted call reports none
    entry.metric = saved.metric if saved is not None else entry.metric
    entry.iteration = done
    if entry.seen_at is None or done < entry.seen_iteration:
        entry.seen_at, entry.seen_iteration = now, done
    elif (made := done - entry.seen_iteration) >= _LEAST_ITERATIONS and entry.phase is JobPhase.TUNING:
        # Times measured on these devices are more accurate than the scheduler's forecast, which is an upper bound.
        if done != before or entry.measured_ends_at is None:
            entry.measured_ends_at = now + (now - entry.seen_at) / made * (entry.iterations - done)
        entry.ends_at = entry.measured_ends_at


class SubmittedJob:
    def __init__(self, ready: CheckedJob, *, name: str, folder: RunFolder, start: bytes) -> None:
        until = ready.job.until
        self._clock = Clock()
        """A clock that ignores changes of the wall clock, because they must not make a job late."""
        self.ready = ready
        self.folder = folder
        self.future: AppCallFuture | None = None
        self._start = start
        self._kept = b""
        self._ended_at: float | None = None
        self.unwritten = ""
        """The error of the last write to the run folder; empty after a success."""
        self.entry = BoardEntry(
            name=name, iterations=until.iterations, metric_name=until.metric.value, reach=until.reach
        )  # fmt: skip

    def submit_to_session(self, *, session: str, gang: tuple[int, int], late: str, bank: str | None) -> None:
        """Submit the job to the loaded session. The time until the job's deadline starts now."""
        app, order = make_tuning_call(self.ready, gang=gang, late=late, bank=bank, start=self._start)
        now = self._clock.now()
        self.future = app(order)
        self.future.add_done_callback(self._record_end_time)
        self._update_entry(
            session=session, submitted_at=now, deadline_at=self.ready.job.deadline_s(submitted_s=now),
            looks_up=order.bank is not None and not self._start and not order.job.prompt.initial.strip(),
        )  # fmt: skip

    def update_state(self, picture: SessionPicture | None) -> None:
        if self.future is None or self.entry.phase.is_over:
            return
        call, before = sent_call(self.future), self.entry
        now = self._clock.now()
        self.entry = update_entry(self.entry, call=call, picture=picture, now=now, ahead_s=now - time.time())
        saved = read_saved_state(call.progress if call is not None else None)
        try:
            if saved is not None and saved.checkpoint != self._kept:
                write_whole(self.folder.path, pack(saved), name=CHECKPOINT)
                self._kept = saved.checkpoint
            if self.future.done():
                self._record_outcome(self.future)
            elif self.entry != before or self.unwritten:
                write_entry(self.folder.path, self.entry)
            self.unwritten = ""
        except StokerError as error:
            self.unwritten = str(error)

    def record_stop(self, why: str) -> None:
        """Record why the submitter stops waiting, unless the run folder cannot be written."""
        if not self.entry.phase.is_over:
            with contextlib.suppress(StokerError):
                self._update_entry(phase=JobPhase.STOPPED, why=why, ended_at=self._clock.now())

    def _record_end_time(self, future: object) -> None:
        del future
        self._ended_at = self._clock.now()

    def _record_outcome(self, future: AppCallFuture) -> None:
        ended = {"ended_at": self._ended_at or self._clock.now(), "why": ""}
        error = future.exception()
        if error is None:
            tuned = future.result()
            _write_results(self.folder, tuned)
            best = tuned.best
            self._update_entry(
                phase=JobPhase.DONE, iteration=tuned.iterations, metric=best.metric, loss=best.loss, **ended
            )
        else:
            phase = JobPhase.DROPPED if isinstance(error, CallDroppedError) else JobPhase.FAILED
            self._update_entry(phase=phase, **{**ended, "why": str(error)})

    def _update_entry(self, **changes: Any) -> None:
        entry = msgspec.structs.replace(self.entry, **changes)
        write_entry(self.folder.path, entry)
        self.entry = entry


def _write_results(folder: RunFolder, tuned: Tuned) -> None:
    """Write the adapter and `tuned.json`, then the evaluations, which mark a finished run."""
    write_tuned(tuned, folder.path)
    rows = [msgspec.structs.asdict(point) for point in tuned.points]

    def write_file(path: Path) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    folder.finish(name="results.jsonl", write=write_file)
    (folder.path / CHECKPOINT).unlink(missing_ok=True)
