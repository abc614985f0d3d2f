"""A simulated device: how fast the calls on it run.

A scenario's call times are those of a device that does nothing else than what `slots` says: a context with two slots
runs two calls at once at that speed, so that each of them takes half of what the device can compute. As long as no
more is wanted than there is, each call runs at full speed, also beside calls of other libraries. When more is wanted,
all calls on the device are slowed down alike: each gets its part of the device in proportion to what it wants. That is
processor sharing, which is what time slices between the kernels of several processes come to.

A call may run on several devices in step, those of one library or of a gang's: then it goes at the speed of the slowest
of them, and what it leaves unused of the others nobody else gets, since it waits there at a barrier.

An engine computes its steps as work that wants all of its devices, and engines take turns
(`stoker.manager.sim.device`); calls of other contexts beside it slow its steps down.

Loads take no part in it: they are limited by links and by the host. Left out: what one library's use of the caches
and of the memory's bandwidth costs another, and computing that gets cheaper by being done together (a context that
does so says it with its slots).

The turns of the engines on a simulated pilot, by the function that every pilot runs (`stoker.pilot.core`).

An engine that wants to compute asks for a turn; it gets one step, or as many as follow each other while nobody else
asks for its devices. Calls of contexts without an engine take no turns: they share a device with whatever computes
there (`stoker.manager.sim.device`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stoker.manager.sim.agenda import Agenda, Entry, cancel
from stoker.pilot.core.turns import TurnRequest, next_turns
from stoker.protocol.ids import DeviceId, LibraryId

# ---- device


_ALL = 1.0 + 1e-9
"""What a device can compute; a little more is rounding."""


class RunningWork:
    """One call that runs. `seconds`: how long it takes at full speed; `began_at`: when it began."""

    __slots__ = (
        "_act", "_args", "_devices", "_entry", "_left_s", "_pace", "_part", "_since", "_slowed", "began_at",
        "seconds",
    )  # fmt: skip

    def __init__(
        self, devices: Sequence[SimulatedDevice], seconds: float, part: float, now: float, act: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self.seconds = seconds
        self._devices = devices
        self._part = part
        self.began_at = self._since = now
        self._left_s = seconds
        self._slowed = False
        self._pace = 1.0
        """Seconds by the clock that a second at full speed takes just now."""
        self._entry: Entry | None = None
        self._act, self._args = act, args


class SimulatedDevice:
    """One device of a simulated pilot."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._works: dict[RunningWork, None] = {}
        self._wanted = 0.0
        """Of what it can compute; more than all of it where calls wait for each other."""
        self._busy_s = self._busy_since = 0.0
        self.before_company: Callable[[], None] | None = None
        """What the only work here wants to do before another one begins beside it."""
        self._holders = 0
        self._held_s = self._held_since = 0.0

    def begin(self, seconds: float, *, part: float, then: Callable[..., None], args: tuple[Any, ...]) -> RunningWork:
        """Run something that takes so long if it gets the part of the device that it wants. `then` is called when it
        has ended, and says so with `done`."""
        work = RunningWork((self,), seconds, part, self._agenda.now, then, args)
        self._enter(work)
        if self._wanted <= _ALL:
            work._entry = self._agenda.after(seconds, then, *args)
        else:
            self._share()
        return work

    @property
    def is_idle(self) -> bool:
        """True while nothing runs on it."""
        return not self._works

    def shorten(self, work: RunningWork, seconds: float) -> None:
        """It takes only so long in all, at full speed."""
        reached_s = self.reached(work)
        work.seconds, work._since = seconds, self._agenda.now
        work._left_s = max(0.0, seconds - reached_s)
        if work._entry is not None:
            cancel(work._entry)
        work._entry = self._agenda.after(work._left_s * work._pace, work._act, *work._args)

    def stop(self, work: RunningWork) -> float:
        """It goes no further, here and wherever it runs in step. Gives back how much of it was done, from 0 to 1."""
        left_s = self._left_s(work)
        if work._entry is not None:
            cancel(work._entry)
        for device in work._devices:
            device._leave(work)
        return 1.0 - left_s / work.seconds if work.seconds else 1.0

    def reached(self, work: RunningWork) -> float:
        """How much of it is done, in seconds at full speed."""
        return work.seconds - self._left_s(work)

    def done(self, work: RunningWork) -> float:
        """It has ended. Gives back how long it has run, in seconds by the clock."""
        for device in work._devices:
            device._leave(work)
        return self._agenda.now - work.began_at if work._slowed else work.seconds

    def busy_s(self, now: float) -> float:
        """For how long at least one call has run on it, until now. Several at once count once."""
        return self._busy_s + (now - self._busy_since if self._works else 0.0)

    def held_s(self, now: float) -> float:
        """For how long at least one library has had it, until now."""
        return self._held_s + (now - self._held_since if self._holders else 0.0)

    def hold(self) -> None:
        """One more library has it."""
        if not self._holders:
            self._held_since = self._agenda.now
        self._holders += 1

    def let_go(self) -> None:
        """One of them has it no more."""
        self._holders -= 1
        if not self._holders:
            self._held_s += self._agenda.now - self._held_since

    def _enter(self, work: RunningWork) -> None:
        if self.before_company is not None:
            self.before_company()
        if not self._works:
            self._busy_since = self._agenda.now
        self._works[work] = None
        self._wanted += work._part

    def _leave(self, work: RunningWork) -> None:
        before = self._wanted
        del self._works[work]
        if not self._works:
            self._busy_s += self._agenda.now - self._busy_since
        self._wanted = before - work._part if self._works else 0.0
        if before > _ALL:
            self._share()

    def _share(self) -> None:
        """Everything that runs here goes on at the speed that is left for it."""
        for work in self._works:
            work._left_s = self._left_s(work)
            work._since = self._agenda.now
            work._slowed = True
            wanted = max(device._wanted for device in work._devices)
            work._pace = wanted if wanted > _ALL else 1.0
            if work._entry is not None:
                cancel(work._entry)
            work._entry = self._agenda.after(work._left_s * work._pace, work._act, *work._args)

    def _left_s(self, work: RunningWork) -> float:
        """What is left of it, in seconds at full speed."""
        return max(0.0, work._left_s - (self._agenda.now - work._since) / work._pace)


def begin_together(
    devices: Sequence[SimulatedDevice], seconds: float, *, part: float, then: Callable[..., None], args: tuple[Any, ...]
) -> RunningWork:
    """Run something on several devices in step. Any of them stops it, or hears that it is done, for all."""
    if len(devices) == 1:
        return devices[0].begin(seconds, part=part, then=then, args=args)
    agenda = devices[0]._agenda
    work = RunningWork(devices, seconds, part, agenda.now, then, args)
    for device in devices:
        device._enter(work)
    crowded = [device for device in devices if device._wanted > _ALL]
    for device in crowded:
        device._share()
    if not crowded:
        work._entry = agenda.after(seconds, then, *args)
    return work


# ---- device turns


class TurnTaker(Protocol):
    """A library's engine, as others on its devices see it."""

    number: LibraryId
    device_ids: tuple[DeviceId, ...]

    @property
    def due_at(self) -> float:
        """When its most urgent token is due; infinity if nobody waits."""

    def take_turn(self, *, leap: bool) -> bool:
        """Compute the next step; `leap`: and those that follow, until it is interrupted. False: nothing is to be
        computed."""

    def interrupt(self) -> None:
        """Somebody else wants one of its devices: the step that is computed now is its last of this turn."""


class DeviceTurns:
    """Who waits for a turn on the devices of one pilot, and who computes."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._waiting: dict[TurnTaker, float] = {}
        """Since when."""
        self._computing: dict[TurnTaker, None] = {}
        self._is_choosing = False

    def ask(self, taker: TurnTaker) -> None:
        """A library wants a turn. It gets one behind all that happens at this moment, so that calls that come together
        are computed together. No-op if it waits or computes."""
        if taker in self._waiting or taker in self._computing:
            return
        self._waiting[taker] = self._agenda.now
        for other in self._computing:
            if not set(other.device_ids).isdisjoint(taker.device_ids):
                other.interrupt()
        self._choose_soon()

    def ended(self, taker: TurnTaker, *, again: bool) -> None:
        """A library's turn is over; it may want another one."""
        del self._computing[taker]
        if again:
            self._waiting[taker] = self._agenda.now
        if not self._is_choosing:
            self._choose()

    def leave(self, taker: TurnTaker) -> None:
        """A library is over, or has nothing to compute any more. No-op if it neither waits nor computes."""
        self._waiting.pop(taker, None)
        if taker in self._computing:
            del self._computing[taker]
            self._choose_soon()

    def _choose_soon(self) -> None:
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
                self._choose_soon()
