"""Measure the cost of the journal: recovery from long journals, journal size, and group sync.

A real manager recovers from a journal in the format of a live manager: after a day of heartbeats (every 5 s) of idle
pilots, or after ended calls, with 1,000 open calls.
"""

from __future__ import annotations

import heapq
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.engine import noop
from benchmarks.engine.driven import SESSION, DrivenCore
from benchmarks.harness import in_turns, ratios, run_side, until
from benchmarks.starting import keep_state_in
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.recipe import Recipe
from stoker.manager.core.events import Command, Event, FromPilot, SetTimer, TimerFired
from stoker.manager.core.pilot_reports import is_heartbeat, needs_heartbeat_record
from stoker.manager.core.reactor import Core
from stoker.manager.executor.processes import create_session_folder
from stoker.manager.live.compaction import JournalCompaction
from stoker.manager.live.decisions import decision_checksum
from stoker.manager.live.journal import Journal
from stoker.manager.policies import default_policies
from stoker.protocol import wire
from stoker.protocol.calls import CallSpec
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, PilotId, RecipeKey
from stoker.protocol.session import SessionFile, SessionFolder
from stoker.protocol.to_manager import DefineFunction, DefineRecipe, DeviceFacts, Heartbeat, Received, Submit

HEARTBEAT_S = 5.0
PAYLOAD = b"x" * 64
IDLE_PILOTS, BUSY_PILOTS, OPEN_CALLS = 2000, 100, 1000


def coming_back(say: Callable[[str], None], *, quick: bool = False) -> Table:
    repeats = 1 if quick else 3
    hours, calls = (0.1, 100_000) if quick else (24.0, 10_000_000)
    cases = {
        "after a day of 2,000 idle pilots": partial(run_side, back_after_idle_pilots, hours=hours, timeout_s=3600),
        "after 10,000,000 ended calls, 1,000 open": partial(run_side, back_after_calls, calls=calls, timeout_s=3600),
    }
    lines = []
    for what, case in cases.items():
        [found] = in_turns({what: case}, repeats, say).values()
        back_s, megabytes = [one["back_s"] for one in found], [one["journal_bytes"] / 1e6 for one in found]
        lines.append(Line(what=f"{what}, s", cells={"s": back_s}, bar=Bar(at_most=5)))
        lines.append(Line(what="the journal's files, MB at most", cells={"MB": megabytes}, bar=Bar(at_most=50)))
    return Table(lines=lines)


def group_sync(say: Callable[[str], None], *, quick: bool = False) -> Table:
    pairs, calls = (1, 2000) if quick else (5, 50_000)
    with tempfile.TemporaryDirectory(prefix="journal-") as place:
        sides = {}
        for side, sync in (("synced in groups", "true"), ("not synced", "false")):
            site = Path(place, f"{sync}.toml")
            site.write_text(f'name = "here"\n[provider]\nkind = "local"\n[session]\nsync = {sync}\n')
            sides[side] = partial(run_side, noop.side, executor="stoker", how="map", calls=calls, site=str(site))
        found = in_turns(sides, pairs, say)
    rates = {side: [one["calls_per_s"] for one in several] for side, several in found.items()}
    cells = {**rates, "synced / not": ratios(*rates.values())}
    return Table(lines=[Line(what="calls/s", cells=cells, bar=Bar(at_least=0.7))])


class Past(DrivenCore):
    def __init__(self, folder: SessionFolder, *, pilots: int) -> None:
        now = time.time() - 30 * 86_400
        super().__init__(Core(SESSION, default_policies(), now=now))
        self.now = now
        self.journal = Journal(folder.journal)
        self.compaction = JournalCompaction(self.journal, snapshot_bytes=0, tail_bytes=0, starts_now=False, tell=print)
        self.most_bytes = 0
        self._folder = folder.path
        self._timers: list[tuple[float, str]] = []
        self.core.start()
        self.pilots = [PilotId(f"node{n}-ab12") for n in range(pilots)]
        facts = (DeviceFacts(DeviceId("cpu:0"), "cpu", 8 * 10**9),)
        self.join(*((pilot, facts) for pilot in self.pilots))

    def give(self, event: Event) -> None:
        self.journal.add_event(self.now, event)
        super().give(event)

    def take(self, commands: list[Command]) -> None:
        self.journal.add_decision_checksum(decision_checksum(commands))
        super().take(commands)

    def set_timer(self, timer: SetTimer) -> None:
        heapq.heappush(self._timers, (timer.at, timer.key))

    def turn_ends(self, *, fast: bool = False) -> None:
        self.journal.flush()
        self.compaction.start_or_check(self.core)
        if fast:
            while self.compaction.wait_s < 1:
                time.sleep(0.01)
                self.compaction.start_or_check(self.core)

    def look_at_size(self) -> None:
        size = sum(path.stat().st_size for path in self._folder.glob("journal*") if path.exists())
        self.most_bytes = max(self.most_bytes, size)

    def pass_until(self, at: float) -> None:
        while self._timers and self._timers[0][0] <= at:
            due, key = heapq.heappop(self._timers)
            if self.core.state.timers.get(key) == due:
                self.now = max(self.now, due)
                self.give(TimerFired(key))
        self.now = at


def journal_of_idle_pilots(folder: SessionFolder, *, hours: float) -> Past:
    past = Past(folder, pilots=IDLE_PILOTS)
    read = wire.from_pilot_decoder()
    frame = wire.encode([Heartbeat()])
    for _ in range(int(hours * 3600 / HEARTBEAT_S)):
        past.pass_until(past.now + HEARTBEAT_S)
        for pilot in past.pilots:
            said = read(frame)
            event = FromPilot(pilot, said.sequence, said.messages)
            if not is_heartbeat(event) or needs_heartbeat_record(past.core.state, event, past.now):
                past.give(event)
        past.turn_ends()
    past.look_at_size()
    return past


def journal_of_ended_calls(folder: SessionFolder, *, calls: int) -> Past:
    past = Past(folder, pilots=BUSY_PILOTS)
    past.client(DefineRecipe(Recipe("bench", "bench", slots=32)), DefineFunction(FunctionKey("f"), "f", b"code"))
    submitted = done = turns = 0
    total = calls + OPEN_CALLS
    while done < calls or submitted < total:
        past.pass_until(past.now + 0.001)
        while submitted - done < 5000 and submitted < total:
            specs = [CallSpec(CallId(submitted + n), PAYLOAD) for n in range(min(256, total - submitted))]
            submitted += len(specs)
            past.client(Submit(FunctionKey("f"), RecipeKey("bench"), specs))
        for library in list(past.held):
            done += past.end(library, min(32, calls - done), run_s=0.01)
        past.client(Received(done))
        past.turn_ends()
        turns += 1
        if not turns % 20:
            past.look_at_size()
    past.turn_ends(fast=True)
    past.look_at_size()
    return past


def restart_s(folder: SessionFolder, *, pilots: int, open_calls: int) -> float:
    key = folder.read_key("server").public
    folder.write(SessionFile(SESSION, wire.VERSION, "tcp://127.0.0.1:21999", key, created_at=time.time()))

    def said() -> str:
        return folder.manager_log.read_text() if folder.manager_log.exists() else ""

    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.manager.main", "--session", str(folder.path), "--name", SESSION]
    )
    try:
        until(lambda: "listens on" in said() or process.poll() is not None, 600.0, "the manager")
        took_s = time.perf_counter() - began
    finally:
        process.kill()
        process.wait()
    if f"{open_calls} calls open" not in said() or f", {pilots} pilots" not in said():
        raise SystemExit(f"the manager does not come back with the same session: {said()[-2000:]}")
    return took_s


def back_after_idle_pilots(hours: float) -> dict[str, float]:
    return _measured(partial(journal_of_idle_pilots, hours=hours), open_calls=0)


def back_after_calls(calls: int) -> dict[str, float]:
    return _measured(partial(journal_of_ended_calls, calls=calls), open_calls=OPEN_CALLS)


def _measured(make: Callable[[SessionFolder], Past], *, open_calls: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="journal-") as place:
        keep_state_in(place)
        folder = SessionFolder(f"{place}/session")
        create_session_folder(folder)
        past = make(folder)
        past.compaction.close()
        past.journal.close()
        back_s = restart_s(folder, pilots=len(past.pilots), open_calls=open_calls)
        return {"back_s": back_s, "journal_bytes": past.most_bytes}
