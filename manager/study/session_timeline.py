"""The timeline of a real session for Perfetto (ui.perfetto.dev), from its journal.

Each pilot is a process in the timeline. Each slot of a library is a row with the load and a bar for each call. If one
message reports several ended calls, their bars are drawn in sequence, and the last bar ends when the message arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.manager.core.events import Event, FromPilot, PilotLost
from stoker.manager.core.nouns import Library, LibraryState
from stoker.manager.core.seams import Policies
from stoker.manager.core.state import State
from stoker.manager.live.restore import JournalReplay
from stoker.manager.study.log_files import TraceEvent, make_name_event, make_slice_event, write_timeline_events
from stoker.protocol import to_manager
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import format_call_id, format_library_id

_SESSION = 1
_FIRST_PILOT = 10
_COUNTED_EVERY_S = 0.1
_MOST_SLOTS = 1000
_SHORT_S = 1e-6


def write_session_timeline(file: Path, journal: Path, *, session: str, policies: Policies) -> int:
    """Write a session's timeline, gzipped if the name ends in `.gz`, and return its number of calls."""
    timeline = _SessionTimeline()
    past = JournalReplay(journal, session, policies)

    def events() -> Iterator[TraceEvent]:
        yield make_name_event("process_name", f"session {session}", pid=_SESSION)
        for now, event in past.read_events():
            if past.core is not None:
                yield from timeline.events_before(now, event, past.core.state)
            past.handle(event, now)
            if past.core is not None:
                yield from timeline.events_after(now, past.core.state)

    write_timeline_events(file, events())
    return timeline.calls


class _SessionTimeline:
    def __init__(self) -> None:
        self.calls = 0
        self._began = 0.0
        self._pilots: dict[str, int] = {}
        self._rows: dict[int, list[float]] = {}  # By library: end time of the last bar in each row
        self._counted_at = float("-inf")

    def events_before(self, now: float, event: Event, state: State) -> Iterator[TraceEvent]:
        """Yield the bars that `event` ends. Must run before the core handles `event`."""
        self._began = self._began or now
        match event:
            case FromPilot(pilot=pilot, messages=messages):
                for message in messages:
                    yield from self._events_of_message(now, pilot, message, state)
            case PilotLost(pilot=pilot, reason=reason) if pilot in self._pilots:
                yield self._instant_event(now, f"lost: {reason}", self._pilots[pilot])

    def events_after(self, now: float, state: State) -> Iterator[TraceEvent]:
        if now - self._counted_at < _COUNTED_EVERY_S:
            return
        self._counted_at = now
        waiting = sum(context.queue.count for context in state.contexts.values())
        for name, value in (("calls that wait", waiting), ("calls that run", len(state.calls) - waiting)):
            at_us = round((now - self._began) * 1e6)
            yield {"ph": "C", "name": name, "ts": at_us, "pid": _SESSION, "args": {name: value}}

    def _events_of_message(
        self, now: float, pilot: str, message: to_manager.FromPilot, state: State
    ) -> Iterator[TraceEvent]:
        match message:
            case to_manager.PilotHello(host=host) if pilot not in self._pilots:
                self._pilots[pilot] = _FIRST_PILOT + len(self._pilots)
                yield make_name_event("process_name", f"{pilot} on {host}", pid=self._pilots[pilot])
                yield self._instant_event(now, "joined", self._pilots[pilot])
            case to_manager.LibraryReady(library=number) if number in state.libraries:
                library = state.libraries[number]
                if library.state is LibraryState.LOADING:
                    yield from self._draw_bar(f"load {library.context.recipe.name}", library, library.started_at, now)
            case to_manager.LibraryGone(library=number, failure=failure) if number in state.libraries:
                why = f": {failure.message}" if failure is not None else ""
                text = f"{format_library_id(number)} ended{why}"
                yield self._instant_event(now, text, self._pilots.get(pilot, _SESSION))
            case to_manager.CallsEnded(library=number, ends=ends) if number in state.libraries:
                yield from self._bars_of_ended_calls(now, state.libraries[number], ends, state)

    def _bars_of_ended_calls(
        self, now: float, library: Library, ends: list[CallEnd], state: State
    ) -> Iterator[TraceEvent]:
        here = [end for end in ends if end.call in library.held]  # the pilot may report an end twice
        left_s = sum(end.run_s for end in here)
        for end in here:
            ended_at = now
            if library.slots == 1:
                left_s -= end.run_s
                ended_at = now - left_s
            began_at = ended_at - end.run_s
            if library.slots == 1 and (rows := self._rows.get(library.id)):
                # If the message is late, do not let the bar overlap the bar of the previous call.
                began_at, ended_at = max(began_at, rows[0]), max(ended_at, rows[0])
            call = state.calls[end.call]
            facts: dict[str, Any] = {"call": format_call_id(end.call), "ok": end.ok}
            if end.raised:
                facts["error"] = end.raised.partition("\n")[0]
            self.calls += 1
            yield from self._draw_bar(call.group.function.name, library, began_at, ended_at, args=facts)

    def _draw_bar(
        self, name: str, library: Library, began_at: float, ended_at: float, **more: Any
    ) -> Iterator[TraceEvent]:
        rows = self._rows.setdefault(library.id, [])
        began_at = max(began_at, self._began)
        row = next((row for row, free_at in enumerate(rows) if free_at <= began_at + _SHORT_S), len(rows))
        pid, tid = self._pilots.get(library.pilot.id, _SESSION), library.id * _MOST_SLOTS + row
        if row == len(rows):
            rows.append(0.0)
            devices = ", ".join(device.id for device in library.devices)
            title = f"{format_library_id(library.id)} {library.context.recipe.name} ({devices})"
            yield make_name_event("thread_name", title, pid=pid, tid=tid)
        rows[row] = ended_at
        yield make_slice_event(name, began_at - self._began, ended_at - self._began, pid=pid, tid=tid, **more)

    def _instant_event(self, now: float, name: str, pid: int) -> TraceEvent:
        return {"ph": "i", "s": "p", "name": name, "ts": round((now - self._began) * 1e6), "pid": pid, "tid": 0}
