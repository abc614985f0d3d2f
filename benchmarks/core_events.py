"""How many events a second the pure core handles, with few and with many calls queued.

An event is a call's arrival, or a call's end. They come as the live loop delivers them: arrivals in Submit messages of
256 calls, ends in frames of 16 to 32, from 1,000 pilots with one hot library each, in random order; each frame that comes
is answered by giving the library as many calls as it has room for. The number of queued calls stays what it was: as many
arrive as end. Only the time in `Core.handle` counts, acknowledgements and all; no sockets, no journal, no encoding.

    python -m benchmarks.core_events [--queued 1000 100000 1000000] [--events 400000] [--repeats 3] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import statistics
import time

from stoker.contexts.recipe import BARE
from stoker.manager.core.commands import Command, ToPilot
from stoker.manager.core.core import Core
from stoker.manager.core.events import FromClient, FromPilot
from stoker.manager.policies import default_policies
from stoker.manager.protocol import wire
from stoker.manager.protocol.calls import CallEnd, CallSpec
from stoker.manager.protocol.ids import CallId, ClientId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey
from stoker.manager.protocol.to_manager import (
    CallsEnded,
    ClientHello,
    DefineFunction,
    DefineRecipe,
    DeviceFacts,
    FromClient as ClientMessage,
    FromPilot as PilotMessage,
    LibraryReady,
    PilotHello,
    Received,
    Submit,
)
from stoker.manager.protocol.to_pilot import RunCalls, StartLibrary

SUBMIT, RUN_S, PAYLOAD = 256, 0.0002, b"x" * 64


class Load:
    """A core with pilots, hot libraries and a queue, and what its pilots hold."""

    def __init__(self, *, pilots: int, queued: int) -> None:
        self.core = Core("bench", default_policies())
        self.spent = 0.0
        self.now = 0.0
        self.results = 0
        self.chance = random.Random(pilots + queued)
        self.held: dict[int, list[CallId]] = {}
        self.home: dict[int, PilotId] = {}
        self._frames: dict[str, int] = {}
        self._calls = 0
        self.client(ClientHello(wire.VERSION, "bench"))
        self.client(DefineRecipe(BARE), DefineFunction(FunctionKey("f"), "f", b"code"))
        for n in range(pilots):
            facts = DeviceFacts(DeviceId("cpu:0"), "cpu", 8 * 10**9)
            self.pilot(PilotId(f"node{n}-ab12"), PilotHello(wire.VERSION, "bench", f"node{n}", 1, (facts,)), number=False)
        self.submit(pilots)
        while len(self.held) < pilots or not all(self.held.values()):
            self.submit(pilots)
        for _ in range(3):  # run times become known, and prefetch windows open
            for library in list(self.held):
                self.end(library, 32)
            self.submit(4 * pilots)
        while self.core.state.contexts["bare"].queue.count < queued:
            self.submit(min(SUBMIT, queued))

    def handle(self, event: FromClient | FromPilot) -> None:
        self.now += 1e-5
        before = time.perf_counter()
        commands = self.core.handle(event, self.now)
        self.spent += time.perf_counter() - before
        self.take(commands)

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if type(command) is ToPilot:
                message = command.message
                if type(message) is RunCalls:
                    self.held.setdefault(message.library, []).extend(spec.call for spec in message.calls)
                elif type(message) is StartLibrary:
                    self.home[message.library] = command.pilot
                    self.held[message.library] = []
                    self.pilot(command.pilot, LibraryReady(message.library, 0.1, 0.1))

    def client(self, *messages: ClientMessage) -> None:
        self.handle(FromClient(ClientId("client-ab"), self._number("client-ab"), list(messages)))

    def pilot(self, pilot: PilotId, *messages: PilotMessage, number: bool = True) -> None:
        self.handle(FromPilot(pilot, self._number(pilot) if number else 0, list(messages)))

    def submit(self, count: int) -> None:
        specs = []
        for _ in range(count):
            self._calls += 1
            specs.append(CallSpec(CallId(self._calls), PAYLOAD))
        self.client(Submit(FunctionKey("f"), RecipeKey("bare"), specs))

    def end(self, library: int, count: int) -> int:
        calls = self.held[library][:count]
        del self.held[library][:count]
        if calls:
            ends = [CallEnd(call, True, b"result", RUN_S) for call in calls]
            self.pilot(self.home[library], CallsEnded(LibraryId(library), ends))
            self.results += len(calls)
        return len(calls)

    def _number(self, peer: str) -> int:
        self._frames[peer] = self._frames.get(peer, 0) + 1
        return self._frames[peer]


def measure(load: Load, *, events: int) -> float:
    """Events a second over so many events."""
    chance, libraries = load.chance, list(load.held)
    handled, owed = 0, 0
    load.spent = 0.0
    while handled < events:
        ended = load.end(chance.choice(libraries), chance.randint(16, 32))
        handled += ended
        owed += ended
        if owed >= SUBMIT:
            owed -= SUBMIT
            handled += SUBMIT
            load.submit(SUBMIT)
            load.client(Received(load.results))
    return handled / load.spent


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--queued", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    ask.add_argument("--pilots", type=int, default=1000)
    ask.add_argument("--events", type=int, default=400_000)
    ask.add_argument("--repeats", type=int, default=3)
    ask.add_argument("--profile", action="store_true")
    ask.add_argument("--json", action="store_true")
    asked = ask.parse_args()
    rates: dict[int, list[float]] = {}
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # as the live loop does
    for queued in asked.queued:
        load = Load(pilots=asked.pilots, queued=queued)
        if asked.profile:
            with cProfile.Profile() as profile:
                measure(load, events=asked.events)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            continue
        rates[queued] = [measure(load, events=asked.events) for _ in range(asked.repeats)]
        state = load.core.state
        assert not state.refused, state.refused
        del load
        gc.collect()
        if not asked.json:
            median, low, high = statistics.median(rates[queued]), min(rates[queued]), max(rates[queued])
            print(f"{queued:>9,} queued, {asked.pilots:,} pilots: {median:>9,.0f} events/s  ({low:,.0f}-{high:,.0f})")
    if asked.json:
        print(json.dumps({"events_per_second": rates}))


if __name__ == "__main__":
    main()
