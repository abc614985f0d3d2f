"""Instances: what each has to do, which of them serve, and their replacement (§4).

An instance answers its requests one by one, in the order in which they came. One that is replaced takes no more
requests, answers those that it has, and is out of service until it has answered them and for a second more. Then its
device serves another runtime. A device that is added is out of service for that second, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from benchmarks.papers.arlo import settings
from benchmarks.papers.arlo.dispatch import Dispatcher


class Agenda:
    """What is to be done at which time, beside requests."""

    def __init__(self) -> None:
        self.next_at = inf
        self._entries: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[[float], None]) -> None:
        self._count += 1
        heappush(self._entries, (when, self._count, action))
        self.next_at = self._entries[0][0]

    def run_next(self) -> None:
        """Do what is first."""
        when, _, action = heappop(self._entries)
        self.next_at = self._entries[0][0] if self._entries else inf
        action(when)


class Fleet:
    """The devices. `rows`: of each runtime, what a request takes by its length. The lists go by instance."""

    def __init__(self, dispatcher: Dispatcher, rows: Sequence[Sequence[float]], agenda: Agenda) -> None:
        self.dispatcher = dispatcher
        self.rows: list[Sequence[float]] = []
        self.free_at: list[float] = []
        self.serves: list[bool] = []
        self.counts = [0] * len(rows)
        """Instances of each runtime, with those that are coming."""
        self.work_s = 0.0
        """Of all requests so far, without what was padded away: what they have kept devices busy."""
        self.out, self.most_out, self.replaced = 0, 0, 0
        """Instances out of service for a replacement, now and at most; all that were replaced."""
        self._runtime_rows, self._runtime_of = rows, list[int]()
        self._agenda = agenda
        self._device_s, self._devices, self._counted_at = 0.0, 0, 0.0

    def start(self, counts: Sequence[int]) -> None:
        """Begin with these instances."""
        for runtime, count in enumerate(counts):
            for _ in range(count):
                self._add(runtime, 0.0)
            self.counts[runtime] = count
        self._count_devices(0.0, sum(counts))

    def serving(self, runtime: int) -> list[int]:
        """The instances of a runtime that take requests, the least busy one first."""
        found = [one for one, at in enumerate(self._runtime_of) if at == runtime and self.serves[one]]
        return sorted(found, key=self.dispatcher.load)

    def scale_up(self, runtime: int, now: float) -> None:
        """Add a device, for this runtime."""
        self._count_devices(now, 1)
        self.counts[runtime] += 1
        self._agenda.at(now + settings.REPLACEMENT_S, lambda at: self._add(runtime, at))

    def release(self, instance: int, now: float) -> None:
        """Release the device of an instance when it has answered what it has."""
        self.counts[self._runtime_of[instance]] -= 1
        self._agenda.at(self._retire(instance, now), lambda at: self._count_devices(at, -1))

    def replace(self, instance: int, runtime: int, now: float, *, then: Callable[[float], None]) -> None:
        """Let the device of an instance serve another runtime."""
        self.counts[self._runtime_of[instance]] -= 1
        self.counts[runtime] += 1
        self.out += 1
        self.replaced += 1
        self.most_out = max(self.most_out, self.out)

        def back(at: float) -> None:
            self.out -= 1
            self._add(runtime, at)
            then(at)

        self._agenda.at(self._retire(instance, now) + settings.REPLACEMENT_S, back)

    def device_s(self, until: float) -> float:
        """Seconds of all devices so far."""
        return self._device_s + (until - self._counted_at) * self._devices

    @property
    def devices(self) -> int:
        """Devices that instances have, or will have when they have come."""
        return sum(self.counts)

    def _add(self, runtime: int, now: float) -> None:
        self.rows.append(self._runtime_rows[runtime])
        self.free_at.append(now)
        self.serves.append(True)
        self._runtime_of.append(runtime)
        self.dispatcher.add(len(self.rows) - 1, runtime)

    def _retire(self, instance: int, now: float) -> float:
        """Give an instance no more requests; when it has answered what it has."""
        self.dispatcher.remove(instance)
        self.serves[instance] = False
        return max(now, self.free_at[instance])

    def _count_devices(self, now: float, more: int) -> None:
        self._device_s, self._counted_at = self.device_s(now), now
        self._devices += more


class Replacements:
    """Brings a fleet to the counts that were decided last, with as few replacements as that takes, a few at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._target: Sequence[int] = ()

    def decide(self, target: Sequence[int], now: float) -> None:
        """The fleet has as many devices as the target."""
        self._target = target
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        most = max(1, int(settings.REPLACED_AT_ONCE * self._fleet.devices))
        while self._fleet.out < most:
            found = self._next()
            if found is None:
                return
            self._fleet.replace(*found, now, then=self._go_on)

    def _next(self) -> tuple[int, int] | None:
        """An instance of a runtime that has too many, and a runtime that has too few."""
        over = [have - want for have, want in zip(self._fleet.counts, self._target, strict=True)]
        missing = min(range(len(over)), key=lambda runtime: over[runtime])
        if over[missing] >= 0:
            return None
        for runtime in sorted(range(len(over)), key=lambda runtime: -over[runtime]):
            serving = self._fleet.serving(runtime)
            if over[runtime] > 0 and len(serving) > (runtime == len(over) - 1):
                return serving[0], missing
        return None
