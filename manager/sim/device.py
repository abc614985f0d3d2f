"""Simulated devices: the speed of calls, and the turns of engines.

Calls run at full speed up to a device's capacity. Above it, all calls on the device slow down equally (processor
sharing). A call on several devices runs at the speed of the slowest. Engines take turns as on real pilots
(`stoker.pilot.core`). Device time for loads, and contention for caches and bandwidth, are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.manager.sim.agenda import Agenda, Entry, cancel
from stoker.pilot.core.turns import TurnRequest, next_turns
from stoker.protocol.ids import DeviceId, LibraryId

_FULL_CAPACITY = 1.0 + 1e-9  # The capacity of a device, with a margin for rounding


@dataclass(slots=True, eq=False)
class RunningWork:
    """`part`: used share of each device. `pace`: simulated seconds per second of work at full speed."""

    devices: Sequence[SimulatedDevice]
    seconds: float
    part: float
    began_at: float
    since: float
    left_s: float
    act: Callable[..., None]
    args: tuple[Any, ...]
    slowed: bool = False
    pace: float = 1.0
    entry: Entry | None = None


class SimulatedDevice:
    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._works: dict[RunningWork, None] = {}
        self._wanted = 0.0
        self._busy_s = self._busy_since = 0.0
        self.before_more_work: Callable[[], None] | None = None
        """Function to call before other work begins on this device; set while one engine simulates several steps at
        once.
        """
        self._holders = 0
        self._held_s = self._held_since = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._works

    def shorten(self, work: RunningWork, seconds: float) -> None:
        reached_s = self.reached(work)
        work.seconds, work.since = seconds, self._agenda.now
        work.left_s = max(0.0, seconds - reached_s)
        self._reschedule(work)

    def _reschedule(self, work: RunningWork) -> None:
        cancel(work.entry)
        work.entry = self._agenda.after(work.left_s * work.pace, work.act, *work.args)

    def stop(self, work: RunningWork) -> float:
        left_s = self._left_s(work)
        cancel(work.entry)
        for device in work.devices:
            device._leave(work)
        return 1.0 - left_s / work.seconds if work.seconds else 1.0

    def reached(self, work: RunningWork) -> float:
        return work.seconds - self._left_s(work)

    def done(self, work: RunningWork) -> float:
        for device in work.devices:
            device._leave(work)
        return self._agenda.now - work.began_at if work.slowed else work.seconds

    def busy_s(self, now: float) -> float:
        return self._busy_s + (now - self._busy_since if self._works else 0.0)

    def held_s(self, now: float) -> float:
        return self._held_s + (now - self._held_since if self._holders else 0.0)

    def hold(self) -> None:
        if not self._holders:
            self._held_since = self._agenda.now
        self._holders += 1

    def let_go(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._held_s += self._agenda.now - self._held_since

    def _enter(self, work: RunningWork) -> None:
        if self.before_more_work is not None:
            self.before_more_work()
        if not self._works:
            self._busy_since = self._agenda.now
        self._works[work] = None
        self._wanted += work.part

    def _leave(self, work: RunningWork) -> None:
        before = self._wanted
        del self._works[work]
        if not self._works:
            self._busy_s += self._agenda.now - self._busy_since
        self._wanted = before - work.part if self._works else 0.0
        if before > _FULL_CAPACITY:
            self._share()

    def _share(self) -> None:
        for work in self._works:
            work.left_s = self._left_s(work)
            work.since = self._agenda.now
            work.slowed = True
            wanted = max(device._wanted for device in work.devices)
            work.pace = wanted if wanted > _FULL_CAPACITY else 1.0
            self._reschedule(work)

    def _left_s(self, work: RunningWork) -> float:
        return max(0.0, work.left_s - (self._agenda.now - work.since) / work.pace)


def begin_work(
    devices: Sequence[SimulatedDevice], seconds: float, *, part: float, then: Callable[..., None], args: tuple[Any, ...]
) -> RunningWork:
    """Start work that takes `seconds` at full speed and the share `part` of each device. The work stops or ends on all
    devices together. At its end, `then` runs and must call `done`.
    """
    agenda = devices[0]._agenda
    work = RunningWork(devices, seconds, part, agenda.now, agenda.now, seconds, then, args)
    for device in devices:
        device._enter(work)
    crowded = [device for device in devices if device._wanted > _FULL_CAPACITY]
    for device in crowded:
        device._share()
    if not crowded:
        work.entry = agenda.after(seconds, then, *args)
    return work


class TurnTaker(Protocol):
    number: LibraryId
    device_ids: tuple[DeviceId, ...]

    @property
    def due_at(self) -> float: ...  # Deadline of the most urgent token; infinity without a deadline

    def take_turn(self, *, leap: bool) -> bool:
        """Begin the next engine step. With `leap`, begin steps until an interrupt. Return False if no work is left."""

    def interrupt(self) -> None: ...  # End the turn after the current engine step


class DeviceTurns:
    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._waiting: dict[TurnTaker, float] = {}  # Waiting engines, each with the time of its request
        self._computing: dict[TurnTaker, None] = {}
        self._is_choosing = False

    def ask(self, taker: TurnTaker) -> None:
        """Request a turn, unless the engine already waits or computes. Requests made at the same time are considered
        together.
        """
        if taker in self._waiting or taker in self._computing:
            return
        self._waiting[taker] = self._agenda.now
        for other in self._computing:
            if not set(other.device_ids).isdisjoint(taker.device_ids):
                other.interrupt()
        self._schedule_next_choice()

    def ended(self, taker: TurnTaker, *, again: bool) -> None:
        del self._computing[taker]
        if again:
            self._waiting[taker] = self._agenda.now
        if not self._is_choosing:
            self._choose()

    def leave(self, taker: TurnTaker) -> None:
        self._waiting.pop(taker, None)
        if taker in self._computing:
            del self._computing[taker]
            self._schedule_next_choice()

    def _schedule_next_choice(self) -> None:
        if not self._is_choosing:
            self._is_choosing = True
            self._agenda.after(0.0, self._choose)

    def _choose(self) -> None:
        self._is_choosing = False
        waiting = self._waiting
        if not waiting:
            return
        if len(waiting) == 1 and not self._computing:
            chosen = list(waiting)
        else:
            takers = {taker.number: taker for taker in waiting}
            asked = [TurnRequest(one.number, one.device_ids, one.due_at, since) for one, since in waiting.items()]
            busy = {device for taker in self._computing for device in taker.device_ids}
            chosen = [takers[number] for number in next_turns(asked, busy)]
        for taker in chosen:
            del waiting[taker]
        wanted = {device for taker in waiting for device in taker.device_ids}
        for taker in chosen:
            if taker.take_turn(leap=wanted.isdisjoint(taker.device_ids)):
                self._computing[taker] = None
            elif waiting:
                self._schedule_next_choice()
