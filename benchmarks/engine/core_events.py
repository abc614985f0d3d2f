"""Measure the manager core alone: `core_events` (events per second) and `memory_per_call`, each in a new process.

An event is the arrival or end of a call. Calls arrive in Submit messages of 256, and end in frames of 16 to 32 from
1,000 pilots with one loaded library each. Only the processor time of `Core.handle` counts.
"""

from __future__ import annotations

import gc
import random
import statistics
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

from benchmarks.engine.driven import CLIENT, SESSION, DrivenCore, collect_as_the_live_loop
from benchmarks.harness import in_turns, run_side
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.recipe import BARE, Recipe
from stoker.manager.core.events import Event, FromClient
from stoker.manager.core.reactor import Core
from stoker.manager.policies import default_policies
from stoker.protocol import wire
from stoker.protocol.calls import CallSpec
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, PilotId, RecipeKey
from stoker.protocol.to_manager import ClientHello, DefineFunction, DefineRecipe, DeviceFacts, Received, Submit

SUBMIT, PAYLOAD = 256, b"x" * 64
SLOTS, RUN_S = 32, 1.0


def events(say: Callable[[str], None], *, quick: bool = False) -> Table:
    sizes, repeats = ((1000, 4000), 1) if quick else ((1000, 100_000, 1_000_000), 5)
    small: dict[str, Any] = {"pilots": 50, "events": 20_000} if quick else {}

    def rate(size: int) -> float:
        return float(run_side(event_rate, queued=size, **small)["events_per_second"])

    rates = in_turns({size: partial(rate, size) for size in sizes}, repeats, say)
    lines = [
        Line(what=f"{queued:,} queued", cells={"events/s": numbers}, bar=Bar(at_least=200_000), last_digits=0)
        for queued, numbers in rates.items()
    ]
    medians = [statistics.median(numbers) for numbers in rates.values()]
    apart = {"slowest / fastest": [min(medians) / max(medians)]}
    what = "the slowest of these against the fastest (medians)"
    lines.append(Line(what=what, cells=apart, bar=Bar(at_least=0.8, repeats=1)))
    return Table(lines=lines)


def memory(say: Callable[[str], None], *, quick: bool = False) -> Table:
    calls, repeats = (5000, 1) if quick else (200_000, 3)
    found = [run_side(bytes_per_call, calls=calls) for _ in range(repeats)]
    cells = {f"{kind} bytes": [one[f"{kind}_bytes_per_call"] for one in found] for kind in ("traced", "resident")}
    say(", ".join(f"{size:.0f} bytes" for size in cells["resident bytes"]))
    line = Line(what=f"{calls:,} queued", cells=cells, bar=Bar(at_most=1000), last_digits=0)
    return Table(lines=[line])


class Load(DrivenCore):
    def __init__(self, *, pilots: int, queued: int) -> None:
        super().__init__(Core(SESSION, default_policies()))
        self.queued = queued
        self.calls = self.results = 0
        self.chance = random.Random(pilots + queued)
        facts = (DeviceFacts(DeviceId("cpu:0"), "cpu", 8 * 10**9),)
        self.join(*((PilotId(f"node{n}-ab12"), facts) for n in range(pilots)))
        self.client(DefineRecipe(Recipe("bench", "bench", slots=SLOTS)), DefineFunction(FunctionKey("f"), "f", b"code"))
        while len(self.held) < pilots or not all(self.held.values()):
            self.submit(SUBMIT)
        for library in list(self.held):  # The core learns the run times and opens the prefetch windows.
            self.end_some(library, 1)
        self.refill()

    @property
    def waiting(self) -> int:
        return self.core.state.contexts["bench"].queue.count

    def refill(self) -> None:
        while self.waiting < self.queued:
            self.submit(SUBMIT)

    def submit(self, count: int) -> None:
        specs = [CallSpec(CallId(self.calls + n), PAYLOAD) for n in range(1, count + 1)]
        self.calls += count
        self.client(Submit(FunctionKey("f"), RecipeKey(SESSION), specs))

    def give(self, event: Event) -> None:
        self.now += 1e-5
        super().give(event)

    def end_some(self, library: int, count: int) -> int:
        ended = self.end(library, count, run_s=RUN_S)
        self.results += ended
        return ended


def measure(load: Load, *, events: int) -> float:
    chance, libraries = load.chance, list(load.held)
    handled, before = 0, load.calls
    load.spent_s = 0.0
    while handled + load.calls - before < events:
        handled += load.end_some(chance.choice(libraries), chance.randint(16, 32))
        if load.waiting < load.queued:
            load.refill()
            load.client(Received(load.results))
    handled += load.calls - before
    return handled / load.spent_s


def queue_calls(core: Core, *, calls: int) -> None:
    decode = wire.from_client_decoder()
    hello = wire.encode(
        [ClientHello(wire.VERSION, SESSION), DefineRecipe(BARE), DefineFunction(FunctionKey("f"), "f", b"code")]
    )
    core.handle(FromClient(CLIENT, 0, decode(hello).messages), 0.0)
    for sequence, start in enumerate(range(0, calls, SUBMIT), start=1):
        numbers = range(start, min(start + SUBMIT, calls))
        specs = [CallSpec(CallId(n), n.to_bytes(len(PAYLOAD), "big")) for n in numbers]
        data = wire.encode([Submit(FunctionKey("f"), RecipeKey("bare"), specs)], sequence=sequence)
        frame = decode(memoryview(data))
        core.handle(FromClient(CLIENT, frame.sequence, frame.messages), start * 1e-6)
    assert len(core.state.calls) == core.state.contexts["bare"].queue.count == calls


def bytes_per_call(calls: int) -> dict[str, float]:
    """Return the bytes per queued call, in the process and in Python's allocator."""

    def core_with(count: int) -> Core:
        core = Core("bench", default_policies())
        queue_calls(core, calls=count)
        gc.collect()
        return core

    process = psutil.Process()
    core_with(SUBMIT)
    gc.collect()
    before = process.memory_info().rss
    core = core_with(calls)
    resident = (process.memory_info().rss - before) / calls
    del core
    gc.collect()
    tracemalloc.start()
    core = core_with(calls)
    traced = tracemalloc.get_traced_memory()[0] / calls
    del core
    tracemalloc.stop()
    return {"resident_bytes_per_call": resident, "traced_bytes_per_call": traced}


def event_rate(queued: int, pilots: int = 1000, events: int = 400_000) -> dict[str, float]:
    collect_as_the_live_loop()
    load = Load(pilots=pilots, queued=queued)
    rate = measure(load, events=events)
    assert not load.core.state.refused, load.core.state.refused
    return {"events_per_second": rate}
