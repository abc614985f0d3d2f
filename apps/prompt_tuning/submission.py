"""One job on its way: handed to a session, watched, and its results written into its run folder."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.apps.prompt_tuning.board import CHECKPOINT, BoardEntry, Phase, write_entry
from stoker.apps.prompt_tuning.submit import CheckedJob, call_of
from stoker.apps.prompt_tuning.watch import SessionPicture, saved_in, updated_entry
from stoker.errors import CallDroppedError, StokerError
from stoker.run_folder import RunFolder, write_whole
from stoker.sessions import Clock, sent_call
from stoker.tuning import Tuned, pack, write_tuned

if TYPE_CHECKING:
    from stoker.sessions import AppCallFuture


class SubmittedJob:
    """One job on its way: what it is, its run folder, and how it stands."""

    def __init__(self, ready: CheckedJob, *, name: str, folder: RunFolder, start: bytes) -> None:
        until = ready.job.until
        self._clock = Clock()
        """A wall clock that is set while the job runs must not make it late, or in time."""
        self.ready = ready
        self.folder = folder
        self.future: AppCallFuture | None = None
        self.tuned: Tuned | None = None
        self._start = start
        self._kept = b""
        self._ended_at: float | None = None
        self.unwritten = ""
        """Why the run folder could not be written at the last look. The next look tries it again."""
        self.entry = BoardEntry(
            name=name, iterations=until.iterations, metric_name=until.metric.value, reach=until.reach
        )  # fmt: skip

    def submit(self, *, session: str, gang: tuple[int, int], late: str, bank: str | None) -> None:
        """Hand it to the session that is loaded; its time to the deadline runs from now."""
        app, order = call_of(self.ready, gang=gang, late=late, bank=bank, start=self._start)
        now = self._clock.now()
        self.future = app(order)
        self.future.add_done_callback(self._over)
        self._note(
            session=session, submitted_at=now, deadline_at=self.ready.job.deadline_s(submitted_s=now),
            looks_up=order.bank is not None and not self._start and not order.job.prompt.initial.strip(),
        )  # fmt: skip

    def refresh(self, picture: SessionPicture | None) -> None:
        """Update the entry by what is known of the job, and write it, now or (if that fails) the next time."""
        if self.future is None or self.entry.phase.is_over:
            return
        call, before = sent_call(self.future), self.entry
        now = self._clock.now()
        self.entry = updated_entry(self.entry, call=call, picture=picture, now=now, ahead_s=now - time.time())
        saved = saved_in(call.progress if call is not None else None)
        try:
            if saved is not None and saved.checkpoint != self._kept:
                write_whole(self.folder.path, pack(saved), name=CHECKPOINT)
                self._kept = saved.checkpoint
            if self.future.done():
                self._settle(self.future)
            elif self.entry != before or self.unwritten:
                write_entry(self.folder.path, self.entry)
            self.unwritten = ""
        except StokerError as error:
            self.unwritten = str(error)

    def stop(self, why: str) -> None:
        """The submitter does not wait for the job any more. It notes so, unless the run folder cannot be written."""
        if not self.entry.phase.is_over:
            with contextlib.suppress(StokerError):
                self._note(phase=Phase.STOPPED, why=why, ended_at=self._clock.now())

    def _over(self, future: object) -> None:
        del future
        self._ended_at = self._clock.now()

    def _settle(self, future: AppCallFuture) -> None:
        ended = {"ended_at": self._ended_at or self._clock.now(), "why": ""}
        error = future.exception()
        if error is None:
            self.tuned = future.result()
            _write_results(self.folder, self.tuned)
            best = self.tuned.best
            self._note(phase=Phase.DONE, iteration=self.tuned.iterations, metric=best.metric, loss=best.loss, **ended)
        else:
            phase = Phase.DROPPED if isinstance(error, CallDroppedError) else Phase.FAILED
            self._note(phase=phase, **{**ended, "why": str(error)})

    def _note(self, **changes: Any) -> None:
        entry = msgspec.structs.replace(self.entry, **changes)
        write_entry(self.folder.path, entry)
        self.entry = entry


def _write_results(folder: RunFolder, tuned: Tuned) -> None:
    """The adapter, what it took, and last the evaluations: where those stand, the run is finished."""
    write_tuned(tuned, folder.path)
    rows = [msgspec.structs.asdict(point) for point in tuned.points]

    def write(path: Path) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    folder.finish(name="results.jsonl", write=write)
    (folder.path / CHECKPOINT).unlink(missing_ok=True)
