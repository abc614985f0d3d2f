"""Simulated devices: the speed of calls, and the turns of engines.

Calls run at full speed up to a device's capacity. Above it, all calls on the device slow down equally (processor
sharing). A call on several devices runs at the speed of the slowest. Engines take turns as on real pilots
(`stoker.pilot.core`). Device time for loads, and contention for caches and bandwidth, are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.manager.sim.agenda import Agenda, AgendaEntry, cancel_entry
from stoker.pilot.core.turns import TurnRequest, choose_next_turns
from stoker.protocol.ids import DeviceId, LibraryId

_FULL_CAPACITY = 1.0 + 1e-9  # The capacity of a device, with a margin for rounding


@dataclass(slots=True, eq=False)
class DeviceWork:
    """Work on devices. `part`: used share of each device. `pace`: simulated seconds per second of full-speed work."""

    devices: Sequence[SimulatedDevice]
    seconds: float
    part: float
    began_at: float
    since: float
    left_s: float
    act: Callable[..., None]
    args: tuple[Any, ...]
    was_slowed: bool = False
    pace: float = 1.0
    entry: AgendaEntry | None = None


class SimulatedDevice:
    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._works: dict[DeviceWork, None] = {}
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

    def shorten_work(self, work: DeviceWork, seconds: float) -> None:
        reached_s = self.reached_s(work)
        work.seconds, work.since = seconds, self._agenda.now
        work.left_s = max(0.0, seconds - reached_s)
        self._reschedule(work)

    def _reschedule(self, work: DeviceWork) -> None:
        cancel_entry(work.entry)
        work.entry = self._agenda.schedule_after(work.left_s * work.pace, work.act, *work.args)

    def stop_work(self, work: DeviceWork) -> float:
        left_s = self._remaining_s(work)
        cancel_entry(work.entry)
        for device in work.devices:
            device._remove_work(work)
        return 1.0 - left_s / work.seconds if work.seconds else 1.0

    def reached_s(self, work: DeviceWork) -> float:
        return work.seconds - self._remaining_s(work)

    def finish_work(self, work: DeviceWork) -> float:
        for device in work.devices:
            device._remove_work(work)
        return self._agenda.now - work.began_at if work.was_slowed else work.seconds

    def busy_s(self, now: float) -> float:
        return self._busy_s + (now - self._busy_since if self._works else 0.0)

    def held_s(self, now: float) -> float:
        return self._held_s + (now - self._held_since if self._holders else 0.0)

    def add_holder(self) -> None:
        if not self._holders:
            self._held_since = self._agenda.now
        self._holders += 1

    def remove_holder(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._held_s += self._agenda.now - self._held_since

    def _add_work(self, work: DeviceWork) -> None:
        if self.before_more_work is not None:
            self.before_more_work()
        if not self._works:
            self._busy_since = self._agenda.now
        self._works[work] = None
        self._wanted += work.part

    def _remove_work(self, work: DeviceWork) -> None:
        before = self._wanted
        del self._works[work]
        if not self._works:
            self._busy_s += self._agenda.now - self._busy_since
        self._wanted = before - work.part if self._works else 0.0
        if before > _FULL_CAPACITY:
            self._reschedule_all_works()

    def _reschedule_all_works(self) -> None:
        for work in self._works:
            work.left_s = self._remaining_s(work)
            work.since = self._agenda.now
            work.was_slowed = True
            wanted = max(device._wanted for device in work.devices)
            work.pace = wanted if wanted > _FULL_CAPACITY else 1.0
            self._reschedule(work)

    def _remaining_s(self, work: DeviceWork) -> float:
        return max(0.0, work.left_s - (self._agenda.now - work.since) / work.pace)


def begin_work(
    devices: Sequence[SimulatedDevice], seconds: float, *, part: float, then: Callable[..., None], args: tuple[Any, ...]
) -> DeviceWork:
    """Start work that takes `seconds` at full speed and the share `part` of each device. The work stops or ends on all
    devices together. At its end, `then` runs and must call `finish_work`.
    """
    agenda = devices[0]._agenda
    work = DeviceWork(devices, seconds, part, agenda.now, agenda.now, seconds, then, args)
    for device in devices:
        device._add_work(work)
    crowded = [device for device in devices if device._wanted > _FULL_CAPACITY]
    for device in crowded:
        device._reschedule_all_works()
    if not crowded:
        work.entry = agenda.schedule_after(seconds, then, *args)
    return work


class TurnTaker(Protocol):
    number: LibraryId
    device_ids: tuple[DeviceId, ...]

    @property
    def due_at(self) -> float: ...  # Deadline of the most urgent token; infinity without a deadline

    def take_turn(self, *, whole_burst: bool) -> bool:
        """Begin the next engine step; with `whole_burst`, steps until `interrupt`. Return False if no work is left."""

    def interrupt(self) -> None: ...  # Stop after the current engine step


class DeviceTurns:
    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._waiting: dict[TurnTaker, float] = {}  # Waiting engines, each with the time of its request
        self._computing: dict[TurnTaker, None] = {}
        self._is_choosing = False

    def request_turn(self, taker: TurnTaker) -> None:
        """Put an engine in the queue for its next step, unless it already waits or computes. Requests of the same time
        are considered together.
        """
        if taker in self._waiting or taker in self._computing:
            return
        self._waiting[taker] = self._agenda.now
        for other in self._computing:
            if not set(other.device_ids).isdisjoint(taker.device_ids):
                other.interrupt()
        self._schedule_next_choice()

    def end_turn(self, taker: TurnTaker, *, needs_another_turn: bool) -> None:
        del self._computing[taker]
        if needs_another_turn:
            self._waiting[taker] = self._agenda.now
        if not self._is_choosing:
            self._start_next_turns()

    def remove_taker(self, taker: TurnTaker) -> None:
        self._waiting.pop(taker, None)
        if taker in self._computing:
            del self._computing[taker]
            self._schedule_next_choice()

    def _schedule_next_choice(self) -> None:
        if not self._is_choosing:
            self._is_choosing = True
            self._agenda.schedule_after(0.0, self._start_next_turns)

    def _start_next_turns(self) -> None:
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
            chosen = [takers[number] for number in choose_next_turns(asked, busy)]
        for taker in chosen:
            del waiting[taker]
        wanted = {device for taker in waiting for device in taker.device_ids}
        for taker in chosen:
            if taker.take_turn(whole_burst=wanted.isdisjoint(taker.device_ids)):
                self._computing[taker] = None
            elif waiting:
                self._schedule_next_choice()
