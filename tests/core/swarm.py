"""Simulate pilots that fetch object parts from each other, with the real core and toy links in virtual time.

The link of each pilot and of the origin has `rate` bytes per second up and down. A pilot requests one part at a time
from each source: a random one of the rarest parts. Parts from a `corrupt` pilot are wrong. Requests to a dead or
unreachable pilot fail after `fail_s`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

from core.builders import SESSION, devices
from core.desk import Desk

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core.events import Command, FromClient, FromPilot, PilotCut, PilotLost, ToPilot
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot, wire
from stoker.protocol.ids import BlockId, ClientId

PART_BYTES = 4 << 20
ORIGIN = "origin"


class Getting:
    """An object that a pilot fetches. `asked`: requested parts; `busy`: sources that are sending a part."""

    def __init__(self, ref: ObjectRef) -> None:
        self.ref = ref
        self.sources: tuple[str, ...] = ()
        self.asked: set[int] = set()
        self.busy: set[str] = set()
        self.failed: set[str] = set()
        self.origin_bytes = self.peer_bytes = 0


class SwarmPilot:
    def __init__(self, name: str, *, serves: bool, cache: str, parts: dict[str, set[int]]) -> None:
        self.name, self.serves, self.cache = name, serves, cache
        self.parts = parts  # the parts in the possibly shared cache of the pilot
        self.getting: dict[str, Getting] = {}
        self.done: dict[str, float] = {}
        self.gave_up: list[str] = []
        self.told = 0
        self.up_free = self.down_free = 0.0
        self.corrupt = self.blind = False  # corrupt: serves wrong bytes; blind: cannot read origins
        self.busy_until = 0.0  # Time until which calls delay the exit of the pilot

    def complete(self, ref: ObjectRef) -> bool:
        return len(self.parts.get(ref.name, ())) == count_of(ref)


def count_of(ref: ObjectRef) -> int:
    return max(1, -(-ref.size_bytes // PART_BYTES))


class Swarm(Desk):
    def __init__(self, *, rate: float = 125e6, fail_s: float = 1.0, seed: int = 1) -> None:
        super().__init__()
        self.rate, self.fail_s = rate, fail_s
        self.chance = random.Random(seed)
        self.pilots: dict[str, SwarmPilot] = {}
        self.caches: dict[str, dict[str, set[int]]] = {}
        self.walls: set[frozenset[str]] = set()
        """Pairs of pilots that cannot reach each other. A single name is a pilot that can reach no other pilot."""
        self.unsaid: dict[str, list[Any]] = {}  # Messages of disconnected pilots
        self.origin_free = 0.0
        self.origin_bytes: dict[str, int] = {}
        self.readers: dict[str, set[str]] = {}
        self.most_readers: dict[str, int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    # ---- events
    def join(self, *names: str, serves: bool = True, cache: str = "") -> Swarm:
        for name in names:
            if name not in self.pilots:
                parts = self.caches.setdefault(cache or name, {})
                self.pilots[name] = SwarmPilot(name, serves=serves, cache=cache, parts=parts)
            pilot = self.pilots[name]
            has = tuple(x for x in pilot.parts if x in pilot.done)
            address = f"{name}:1" if pilot.serves else ""
            unsaid = self.unsaid.pop(name, [])
            hello = say.PilotHello(
                wire.VERSION, SESSION, name, 7, devices(1), name, objects=has, peer=address, cache=pilot.cache
            )
            self.report(name, hello)
            self.report(name, *unsaid)
        return self

    def want(self, *names: str, refs: Iterable[ObjectRef]) -> Swarm:
        refs = tuple(refs)
        for name in names:
            pilot = self.pilots[name]
            missing = tuple(ref for ref in refs if not pilot.complete(ref))
            for ref in missing:
                pilot.getting.setdefault(ref.name, Getting(ref))
            self.report(name, say.WantObjects(missing))
        return self

    def report(self, name: str, *messages: Any) -> None:
        if name in self.unsaid:
            self.unsaid[name] += messages
        else:
            self._carry_out(self.give(FromPilot(name, 0, list(messages))))

    def drain(self, name: str, *, busy_s: float = 0.0) -> Swarm:
        """Drain a pilot. After its calls, the pilot exits when its objects are replicated or its time ends."""
        self.pilots[name].busy_until = self.now + busy_s
        hello = say.ClientHello(wire.VERSION, SESSION)
        release = say.ReleaseBlock(BlockId(name))
        self._carry_out(self.give(FromClient(ClientId("ana"), 0, [hello, release])))
        return self

    def _leave(self, name: str) -> None:
        if name in self.pilots and name not in self.unsaid:
            self.kill(name)

    def kill(self, name: str) -> Swarm:
        del self.pilots[name]
        self.unsaid.pop(name, None)
        for readers in self.readers.values():
            readers.discard(name)
        self._carry_out(self.give(PilotLost(name, "silent")))
        return self

    def cut(self, name: str) -> Swarm:
        """Disconnect a pilot. The pilot continues to fetch and reports its fetches after the reconnect."""
        self.unsaid[name] = []
        self._carry_out(self.give(PilotCut(name)))
        return self

    def evict(self, name: str, ref: ObjectRef) -> Swarm:
        parts = self.pilots[name].parts
        parts.pop(ref.name, None)
        for pilot in self.pilots.values():
            if pilot.parts is parts:
                pilot.getting.pop(ref.name, None)
                pilot.done.pop(ref.name, None)
                self.report(pilot.name, say.ObjectsGone((ref.name,)))
        return self

    def wall(self, *names: str) -> None:
        self.walls.add(frozenset(names))

    def run(self, *, until: float = float("inf")) -> Swarm:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, what = heapq.heappop(self._heap)
            what()
        return self

    def waiting(self) -> list[tuple[str, str]]:
        return [(pilot.name, name) for pilot in self.pilots.values() for name in pilot.getting]

    # ---- links
    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._count), what))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case ToPilot(name, to_pilot.FetchObject() as order) if name in self.pilots:
                    self._hear(self.pilots[name], order)
                case ToPilot(name, to_pilot.Exit(hand_on_s=hand_on_s)) if name in self.pilots:
                    stays_s = max(hand_on_s, self.pilots[name].busy_until - self.now)
                    self.after(stays_s, lambda name=name: self._leave(name))

    def _hear(self, pilot: SwarmPilot, order: to_pilot.FetchObject) -> None:
        ref = order.object
        pilot.told += 1
        readers = self.readers.setdefault(ref.name, set())
        if not order.peers and not order.origin:
            pilot.getting.pop(ref.name, None)
            pilot.gave_up.append(ref.name)
            readers.discard(pilot.name)
            return
        getting = pilot.getting.get(ref.name)
        if getting is None and order.keep and not pilot.complete(ref):
            getting = pilot.getting[ref.name] = Getting(ref)
        if getting is None:  # the pilot does not need this object any more
            self.report(pilot.name, say.ObjectsGone((ref.name,)))
            return
        getting.failed.clear()  # the manager offers only sources that may work again
        getting.sources = tuple(str(peer.pilot) for peer in order.peers) + ((ORIGIN,) if order.origin else ())
        if pilot.complete(ref):  # another pilot has put the object into the cache
            self._complete(pilot, getting)
            return
        (readers.add if order.origin else readers.discard)(pilot.name)
        self.most_readers[ref.name] = max(self.most_readers.get(ref.name, 0), len(readers))
        self._go_on(pilot, getting)

    # ---- parts
    def _go_on(self, pilot: SwarmPilot, getting: Getting) -> None:
        here = self.pilots.get(pilot.name) is pilot and pilot.getting.get(getting.ref.name) is getting
        for source in getting.sources if here else ():
            if source not in getting.busy and source not in getting.failed:
                self._ask(pilot, getting, source)

    def _reaches(self, pilot: SwarmPilot, source: str) -> bool:
        closed = any(wall in self.walls for wall in ({pilot.name}, {source}, {pilot.name, source}))
        return source == ORIGIN or (source in self.pilots and not closed)

    def _has(self, source: str, ref: ObjectRef) -> set[int]:
        if source == ORIGIN:
            return set(range(count_of(ref)))
        return self.pilots[source].parts.get(ref.name, set()) if source in self.pilots else set()

    def _ask(self, pilot: SwarmPilot, getting: Getting, source: str) -> None:
        if not self._reaches(pilot, source) or (source == ORIGIN and pilot.blind):
            getting.busy.add(source)
            self.after(self.fail_s, lambda: self._fail(pilot, getting, source))
            return
        ref = getting.ref
        mine = pilot.parts.setdefault(ref.name, set())
        missing = sorted(self._has(source, ref) - mine - getting.asked)
        if not missing:
            return
        held = [self._has(other, ref) for other in getting.sources if other != ORIGIN]
        self.chance.shuffle(missing)
        part = min(missing, key=lambda part: sum(part in parts for parts in held))
        getting.asked.add(part)
        getting.busy.add(source)
        took_s = PART_BYTES / self.rate
        up_free = self.origin_free if source == ORIGIN else self.pilots[source].up_free
        sent = max(self.now, up_free) + took_s
        if source == ORIGIN:
            self.origin_free = sent
        else:
            self.pilots[source].up_free = sent
        pilot.down_free = max(sent, pilot.down_free + took_s)
        self.after(pilot.down_free - self.now, lambda: self._part(pilot, getting, source, part))

    def _part(self, pilot: SwarmPilot, getting: Getting, source: str, part: int) -> None:
        if self.pilots.get(pilot.name) is not pilot or pilot.getting.get(getting.ref.name) is not getting:
            return
        ref = getting.ref
        getting.asked.discard(part)
        getting.busy.discard(source)
        if source != ORIGIN and (source not in self.pilots or self.pilots[source].corrupt):
            self._fail(pilot, getting, source)
            return
        pilot.parts[ref.name].add(part)
        if source == ORIGIN:
            getting.origin_bytes += PART_BYTES
            self.origin_bytes[ref.name] = self.origin_bytes.get(ref.name, 0) + PART_BYTES
        else:
            getting.peer_bytes += PART_BYTES
        if pilot.complete(ref):
            self._completed(pilot.parts, ref)
        near = {other.name for other in self.pilots.values() if other.parts is pilot.parts}
        for other in list(self.pilots.values()):
            theirs = other.getting.get(ref.name)
            if theirs is not None and (other.name in near or not near.isdisjoint(theirs.sources)):
                self._go_on(other, theirs)

    def _completed(self, parts: dict[str, set[int]], ref: ObjectRef) -> None:
        for pilot in list(self.pilots.values()):
            getting = pilot.getting.get(ref.name)
            if pilot.parts is parts and getting is not None and getting.sources:
                self._complete(pilot, getting)

    def _complete(self, pilot: SwarmPilot, getting: Getting) -> None:
        ref = getting.ref
        del pilot.getting[ref.name]
        pilot.done[ref.name] = self.now
        self.readers.get(ref.name, set()).discard(pilot.name)
        arrival = say.ObjectArrival(ref.name, ref.size_bytes, getting.origin_bytes, getting.peer_bytes)
        self.report(pilot.name, say.ObjectsCached((arrival,)))

    def _fail(self, pilot: SwarmPilot, getting: Getting, source: str) -> None:
        getting.busy.discard(source)
        if self.pilots.get(pilot.name) is not pilot or pilot.getting.get(getting.ref.name) is not getting:
            return
        if source == ORIGIN:
            self.readers[getting.ref.name].discard(pilot.name)
            getting.sources = tuple(name for name in getting.sources if name != ORIGIN)
            self.report(pilot.name, say.FetchFailed(getting.ref.name, origin=True, reason="no such file"))
        else:
            getting.failed.add(source)
            self.report(pilot.name, say.FetchFailed(getting.ref.name, (source,), reason="timed out"))
        self._go_on(pilot, getting)
