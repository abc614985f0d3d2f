"""A toy cluster in virtual time: the real core and policies, toy pilots, a client.

Messages take `latency_s`, stay in order, and may be lost with their connection. Runs are deterministic.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
from core.builders import devices as make_devices
from core.builders import recipe
from core.desk import SESSION, Desk
from core.toy_pilot import ToyPilot, Work

from stoker.contexts.recipe import BARE
from stoker.manager.core import events, story
from stoker.protocol import to_client, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, Features
from stoker.units import parse_bytes


class Cost(msgspec.Struct, frozen=True):
    """Real cost of a context in the toy world."""

    load_s: float = 1.0
    resident_bytes: int = 10**9
    broken: str = ""
    run_s: float = 0.0  # Seconds of every call; 0 = as the call specifies
    sleeps: bool = False


class Toy(Desk):
    def __init__(self, *, latency_s: float = 0.001, resize_s: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.session = SESSION
        self.latency_s, self.resize_s = latency_s, resize_s
        self.ignore_stops = False  # True if running calls ignore cancellation, so their libraries end
        self.pilots: dict[str, ToyPilot] = {}
        self.links: dict[str, int] = {}  # The number of a pilot's open connection; 0 = none
        self.costs = {"bare": Cost(0.1, 50_000_000)}
        self.ids: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.ended: dict[str, CallEnd] = {}
        self.ended_at: dict[str, float] = {}
        self.over = ""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._links = itertools.count(1)
        self._frames = itertools.count(1)
        for commands in self.did:
            self._carry_out(commands)
        self.tell(say.ClientHello(wire.VERSION, SESSION), numbered=False)
        self.tell(say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code"))

    # ---- time
    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + max(0.0, seconds), next(self._count), what))

    def run(self, *, until: float = 0.0, limit_s: float = 10_000.0) -> Toy:
        stop = until or self.now + limit_s
        while self._heap and (until or self.core.state.calls or self._heap[0][0] <= self.now):
            if self._heap[0][0] > stop:
                break
            self.now, _, what = heapq.heappop(self._heap)
            what()
        if until:
            self.now = max(self.now, until)
        else:
            assert not self.core.state.calls, f"after {limit_s} s {self.open()} still wait: {self._why()}"
        return self

    def _why(self) -> str:
        call = next(iter(self.core.state.calls))
        libraries = [
            f"lib-{x.id} {x.context.recipe.name} {x.state.value} on {x.pilot.id}, {x.pilot.state.value}: holds "
            f"{list(x.held)}, drops {x.withdrawn_calls}, suspects {x.call_that_runs_alone}, promised {x.promised_bytes}"
            for x in self.core.state.libraries.values()
        ]
        return "\n".join([str(story.tell_story(self.core.state, str(call))), *libraries])

    def open(self) -> list[str]:
        return [self.names[id] for id in self.core.state.calls]

    # ---- pilots and contexts
    def pilot(
        self, name: str, *, devices: int = 1, kind: str = "cpu", memory: str = "8 GB", block: str = ""
    ) -> ToyPilot:
        facts = make_devices(devices, kind=kind, memory=memory)
        pilot = self.pilots[name] = ToyPilot(self, name, facts, block=block)
        self._connect(pilot)
        return pilot

    def context(
        self, key: str, *, load_s: float = 1.0, memory: str = "1 GB", declares: str = "", broken: str = "",
        runs_s: float = 0.0, sleeps: bool = False, **needs: Any,
    ) -> Toy:  # fmt: skip
        """Add a context that uses `memory` bytes but declares `declares` bytes."""
        self.costs[key] = Cost(load_s, parse_bytes(memory), broken, runs_s, sleeps)
        return self.tell(say.DefineRecipe(recipe(key, memory=declares, **needs)))

    def call(
        self, *names: str, context: str = "bare", items: int = 1, run_s: float = 1.0, raises: bool = False,
        kills: bool = False, step_s: float = 0.0, shared: bool = False, meet_s: float = 0.0, fixed_s: float = 0.0,
        failed_by: str = "", **how: Any,
    ) -> Toy:  # fmt: skip
        payload = msgspec.msgpack.encode(Work(run_s, raises, kills, step_s, shared, meet_s, failed_by))
        specs = []
        for name in names:
            id = len(self.ids) + 1
            self.ids[name], self.names[id] = id, name
            specs.append(CallSpec(id, payload, Features(items, fixed_s=fixed_s)))
        return self.tell(say.Submit("f", context, specs, CallOptions(**how)))

    def tell(self, *messages: Any, numbered: bool = True) -> Toy:
        sequence = next(self._frames) if numbered else 0
        self._carry_out(self.give(events.FromClient("ana", sequence, list(messages))))
        return self

    def cut(self, name: str, *, back_after: float = 0.0) -> None:
        """Break the connection and lose its messages; reconnect after `back_after` seconds (0: never)."""
        self.links[name] = 0
        self._event(events.PilotCut(name))
        if back_after:
            self.after(back_after, lambda: self._connect(self.pilots[name]))

    def kill(self, name: str) -> None:
        self.pilots[name].alive = False
        self.cut(name)
        self._event(events.PilotLost(name, "killed by the batch system"))

    def advise(self, key: str, *, after_s: float, **facts: Any) -> None:
        advice = events.CostAdvice({"": events.ContextAdvice(**facts)})
        self.after(after_s, lambda: self._event(events.AdviceArrived(events.OfContext(key), advice)))

    # ---- links
    def _connect(self, pilot: ToyPilot) -> None:
        if pilot.alive:
            self.links[pilot.name] = next(self._links)
            pilot.greet()

    def from_pilot(self, pilot: ToyPilot, sequence: int, messages: list[Any]) -> None:
        link, event = self.links.get(pilot.name), events.FromPilot(pilot.name, sequence, messages)
        if link:
            self.after(self.latency_s, lambda: self._event(event) if self.links[pilot.name] == link else None)

    def _event(self, event: Any) -> None:
        self._carry_out(self.give(event))

    def _carry_out(self, commands: list[events.Command]) -> None:
        for command in commands:
            match command:
                case events.ToPilot(name, message):
                    self._to_pilot(str(name), message)
                case events.ToClient(_, to_client.Results(first, ends)):
                    assert first <= len(self.ended), "results were skipped"
                    for end in ends[len(self.ended) - first :]:
                        name = self.names[end.call]
                        assert name not in self.ended, f"{name} ended twice"
                        self.ended[name], self.ended_at[name] = end, self.now
                case events.SetTimer(at, key):
                    self.after(at - self.now, lambda key=key, at=at: self._timer(key, at))
                case events.EndManager(reason):
                    self.over = reason

    def _to_pilot(self, name: str, message: Any) -> None:
        pilot, link = self.pilots.get(name), self.links.get(name)
        if pilot is not None and link:
            self.after(
                self.latency_s, lambda: pilot.hear(message) if pilot.alive and self.links[name] == link else None
            )

    def _timer(self, key: str, at: float) -> None:
        if self.core.state.timers.get(key) == at:
            self._event(events.TimerFired(key))
