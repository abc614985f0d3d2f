"""Measure the cost of the journal: recovery from long journals, journal size, and group sync.

A real manager recovers from a journal in the format of a live manager.

    python -m benchmarks.reliability.journal idle --pilots 2000 --hours 24     a day of heartbeats, every 5 s
    python -m benchmarks.reliability.journal ended --calls 10000000  calls that ended, and 1,000 open calls
    python -m benchmarks.reliability.journal map --sync true  calls/s of a program, with or without group sync
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
from typing import Any, Literal

from benchmarks.engine.driven import SESSION, DrivenCore
from benchmarks.harness import in_turns, ratios, run_side, until
from benchmarks.starting import keep_state_in, print_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.recipe import Recipe
from stoker.manager.core.events import Command, Event, FromPilot, SetTimer, TimerFired
from stoker.manager.core.pilot_reports import is_heartbeat, needs_heartbeat_record
from stoker.manager.core.reactor import Core
from stoker.manager.executor.processes import make_folder
from stoker.manager.live import compaction
from stoker.manager.live.compaction import Compaction
from stoker.manager.live.decisions import decision_checksum
from stoker.manager.live.journal import Journal
from stoker.manager.policies import default_policies
from stoker.protocol import wire
from stoker.protocol.calls import CallSpec
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, PilotId, RecipeKey
from stoker.protocol.session import SessionFile, SessionFolder
from stoker.protocol.to_manager import DefineFunction, DefineRecipe, DeviceFacts, Heartbeat, Received, Submit

BACK, BACK_TITLE = "journal", "a manager comes back after a day of idle pilots, and after millions of calls"
SYNC, SYNC_TITLE = "journal_sync", "calls/s through map with the journal synced in groups against no sync"
_SIDE = "benchmarks.reliability.journal"


def coming_back(say: Callable[[str], None], *, quick: bool = False) -> Table:
    repeats = 1 if quick else 3
    hours, calls = ("0.1", "100000") if quick else ("24", "10000000")
    cases = {
        "after a day of 2,000 idle pilots": ("idle", "--hours", hours),
        "after 10,000,000 ended calls, 1,000 open": ("ended", "--calls", calls),
    }
    lines = []
    for what, arguments in cases.items():
        side = {what: partial(run_side, _SIDE, *arguments, timeout_s=3600)}
        [found] = in_turns(side, repeats, say, lambda what, one: f"{what}: {one['back_s']:.2f} s").values()
        back_s, megabytes = [one["back_s"] for one in found], [one["journal_bytes"] / 1e6 for one in found]
        lines.append(Line(what=f"{what}, s", cells={"s": back_s}, bar=Bar(at_most=5)))
        lines.append(Line(what="the journal's files, MB at most", cells={"MB": megabytes}, bar=Bar(at_most=50)))
    return Table(name=BACK, title=BACK_TITLE, lines=lines)


def group_sync(say: Callable[[str], None], *, quick: bool = False) -> Table:
    pairs, calls = (1, "2000") if quick else (5, "50000")
    sides = {
        side: partial(run_side, _SIDE, "map", "--sync", sync, "--calls", calls)
        for side, sync in (("synced in groups", "true"), ("not synced", "false"))
    }
    found = in_turns(sides, pairs, say, lambda side, one: f"{one['calls_per_s']:,.0f}/s {side}")
    rates = {side: [one["calls_per_s"] for one in several] for side, several in found.items()}
    cells = {**rates, "synced / not": ratios(*rates.values())}
    return Table(name=SYNC, title=SYNC_TITLE, lines=[Line(what="calls/s", cells=cells, bar=Bar(at_least=0.7))])


HEARTBEAT_S = 5.0
PAYLOAD = b"x" * 64


class Past(DrivenCore):
    def __init__(self, folder: SessionFolder, *, pilots: int) -> None:
        now = time.time() - 30 * 86_400
        super().__init__(Core(SESSION, default_policies(), now=now))
        self.now = now
        self.journal = Journal(folder.journal)
        self.compaction = Compaction(self.journal, snapshot_bytes=0, tail_bytes=0, now=False, tell=print)
        self.most_bytes = 0
        self._folder = folder.path
        self._timers: list[tuple[float, str]] = []
        self.core.start()
        self.pilots = [PilotId(f"node{n}-ab12") for n in range(pilots)]
        facts = (DeviceFacts(DeviceId("cpu:0"), "cpu", 8 * 10**9),)
        self.join(*((pilot, facts) for pilot in self.pilots))

    def give(self, event: Event) -> None:
        self.journal.write(self.now, event)
        super().give(event)

    def take(self, commands: list[Command]) -> None:
        self.journal.decided(decision_checksum(commands))
        super().take(commands)

    def set_timer(self, timer: SetTimer) -> None:
        heapq.heappush(self._timers, (timer.at, timer.key))

    def turn_ends(self, *, fast: bool = False) -> None:
        self.journal.flush()
        self.compaction.advance(self.core)
        if fast:
            while self.compaction.wait_s < 1:
                time.sleep(0.01)
                self.compaction.advance(self.core)

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


def journal_of_idle_pilots(folder: SessionFolder, *, pilots: int, hours: float) -> Past:
    past = Past(folder, pilots=pilots)
    read = wire.from_pilot()
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


def journal_of_ended_calls(folder: SessionFolder, *, calls: int, open_calls: int, pilots: int = 100) -> Past:
    past = Past(folder, pilots=pilots)
    past.client(DefineRecipe(Recipe("bench", "bench", slots=32)), DefineFunction(FunctionKey("f"), "f", b"code"))
    submitted = done = turns = 0
    while done < calls or submitted < calls + open_calls:
        past.pass_until(past.now + 0.001)
        while submitted - done < 5000 and submitted < calls + open_calls:
            specs = [CallSpec(CallId(submitted + n), PAYLOAD) for n in range(min(256, calls + open_calls - submitted))]
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


def measure_restart(folder: SessionFolder, *, pilots: int, open_calls: int) -> dict[str, Any]:
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
    return {"back_s": took_s}


def rate(*, sync: str, calls: int) -> dict[str, Any]:
    """Return the calls/s of `noop` through `stoker.map`, with or without group sync of the journal."""
    site = Path("site.toml").absolute()
    site.write_text(f'name = "here"\n[provider]\nkind = "local"\n[session]\nsync = {sync}\n')
    return run_side("benchmarks.engine.noop", "stoker", "map", "--calls", str(calls), "--site", str(site))


def side(
    what: Literal["idle", "ended", "map"], pilots: int = 2000, hours: float = 24.0, calls: int = 10_000_000,
    open: int = 1000, sync: str = "true",
) -> dict[str, Any]:  # fmt: skip
    if what == "map":
        return rate(sync=sync, calls=calls)
    with tempfile.TemporaryDirectory(prefix="journal-") as place:
        keep_state_in(place)
        folder = SessionFolder(f"{place}/session")
        make_folder(folder)
        begun = time.perf_counter()
        if what == "idle":
            past, open_calls = journal_of_idle_pilots(folder, pilots=pilots, hours=hours), 0
        else:
            past, open_calls = journal_of_ended_calls(folder, calls=calls, open_calls=open), open
        past.compaction.close()
        past.journal.close()
        made_s = time.perf_counter() - begun
        found = measure_restart(folder, pilots=len(past.pilots), open_calls=open_calls)
        least = compaction.LEAST_BYTES
        return {**found, "journal_bytes": past.most_bytes, "least_bytes": least, "made_s": made_s}


if __name__ == "__main__":
    print_side(side, __doc__)
