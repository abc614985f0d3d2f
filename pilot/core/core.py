"""A pilot as a pure function of its state, an event and the time.

`PilotCore.handle` decides everything that a pilot decides; its shells carry the commands out: the agent with processes
and sockets, the simulator in virtual time, the TaskVine pool through TaskVine. An event is handled by one file each
(handlers), which changes the state through those that own it (transitions, named in `state`). Between the world and the
core every shell has an `EventQueue`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import assert_never

from stoker.pilot.core import library_messages, lifecycle, limits, objects, orders, presence, probes, running, starting
from stoker.pilot.core.commands import Command, Observe
from stoker.pilot.core.events import (
    ArgumentsBrought,
    CacheListed,
    DeviceAway,
    DevicesMeasured,
    DriverSaid,
    EngineEnded,
    Event,
    Farewell,
    FromLibrary,
    FromManager,
    HandedIn,
    HelloDue,
    LibraryGarbled,
    LibraryHungUp,
    LibraryPrepared,
    ManagerAway,
    ObjectArrived,
    ObjectLost,
    Observed,
    OfferWeighed,
    Pinned,
    Probed,
    ProcessEnded,
    ProcessMade,
    RoomWanted,
    Signalled,
    SnapshotTaken,
    SourceFailed,
    Tick,
    TimerFired,
    Unfit,
    UsageMeasured,
    WalltimeKnown,
    WasStopped,
)
from stoker.pilot.core.lifecycle import load_failure
from stoker.pilot.core.state import CoreState, PilotFacts


class PilotCore:
    """One pilot. `state` is for reading."""

    def __init__(self, facts: PilotFacts) -> None:
        self.state = CoreState(facts)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Returns the commands that an event leads to. `now` is in seconds and never goes back."""
        state = self.state
        state.now = now
        match event:
            case FromManager(message=message):
                orders.handle(state, message)
            case FromLibrary():
                library_messages.handle(state, event)
            case HelloDue():
                presence.greet(state, event)
            case ManagerAway():
                presence.manager_away(state, event)
            case OfferWeighed():
                orders.offer_weighed(state, event)
            case UsageMeasured():
                presence.send_heartbeat(state, event)
            case Tick():
                presence.on_tick(state, event)
            case WalltimeKnown(left_s=left_s):
                presence.walltime_known(state, left_s)
            case Signalled():
                presence.signalled(state, event)
            case Farewell(running=ran):
                presence.farewell(state, ran)
            case Unfit(reason=reason, loss=loss):
                state.is_unfit = True
                lifecycle.leave(state, reason, within_s=0.0, loss=loss)
            case EngineEnded(reason=reason):
                lifecycle.drain(state, reason, within_s=state.facts.grace_s, code=1)
            case ObjectArrived():
                starting.object_arrived(state, event)
            case ObjectLost(name=name, lack=lack):
                starting.object_lost(state, name, lack)
            case SourceFailed(name=name, reason=reason, peer=peer):
                objects.source_failed(state, name, reason, peer)
            case CacheListed(sizes=sizes):
                objects.compare_with_cache(state, sizes)
            case HandedIn():
                running.results_handed_in(state, event)
            case SnapshotTaken(here=here):
                state.told.add(here.object.name)
                state.told_snapshots.append(here)
                state.tell(here)
            case DevicesMeasured():
                limits.settle_reservations(state, event)
            case Probed():
                probes.probed(state, event)
            case DriverSaid():
                probes.driver_said(state, event)
            case DeviceAway(device=device, reason=reason):
                probes.device_away(state, device, reason)
            case TimerFired(key=key):
                self._timer(key)
            case Observed(libraries=seen):
                for one in seen:
                    library = state.libraries.get(one.library)
                    if library is not None:
                        limits.enforce_limits(state, library, one)
            case WasStopped(seconds=seconds):
                limits.extend_limits(state, seconds)
            case (
                LibraryPrepared()
                | ProcessMade()
                | ProcessEnded()
                | LibraryGarbled()
                | LibraryHungUp()
                | RoomWanted()
                | Pinned()
                | ArgumentsBrought()
            ):
                self._of_library(event)
            case _:
                assert_never(event)
        if state.ledger.has_freed and state.claims:
            starting.meet_memory_claims(state)
        out, state.out = state.out, []
        return out

    def _of_library(
        self,
        event: LibraryPrepared
        | ProcessMade
        | ProcessEnded
        | LibraryGarbled
        | LibraryHungUp
        | RoomWanted
        | Pinned
        | ArgumentsBrought,
    ) -> None:
        state = self.state
        library = state.libraries.get(event.library)
        if library is None:
            return  # it has ended meanwhile
        match event:
            case LibraryPrepared():
                starting.library_prepared(state, library, event)
            case ProcessMade(pid=pid):
                library.pid = pid
            case ProcessEnded(cause=cause, is_pilots_fault=is_pilots_fault, verdict=verdict):
                if verdict is not None:
                    lifecycle.blame(library, verdict)
                if cause:
                    lifecycle.blame(library, load_failure(state, library, cause, is_pilots_fault=is_pilots_fault))
                lifecycle.finish_library(state, library, event)
            case LibraryGarbled(reason=reason):
                library_messages.library_garbled(state, library, reason)
            case LibraryHungUp():
                library.hung_up_at = library.hung_up_at or state.now
            case RoomWanted(reason=reason):
                lifecycle.stop_library(state, library.number, drain=True, reason=reason)
            case Pinned():
                starting.objects_pinned(state, library, event)
            case ArgumentsBrought():
                running.arguments_brought(state, library, event)
            case _:
                assert_never(event)

    def _timer(self, key: str) -> None:
        """`snapshots/3`: lib-3 has waited long enough for them; `memory/3`: for room on its devices, for a while;
        `cancel/3`: a call of it has had its time to end."""
        what, _, number = key.partition("/")
        library = self.state.libraries.get(int(number))  # type: ignore[call-overload]
        if library is None:
            return
        if what == "snapshots":
            starting.stop_waiting_for_snapshots(self.state, library)
        elif what == "memory":
            starting.check_memory_claim(self.state, library)
        elif library.stopping:
            self.state.out.append(Observe(library.number))


class EventQueue:
    """Tells a core of events at the time of `clock`, and has what it wants carried out.

    An event that carrying out a command leads to is handled after the rest of the commands, so that the core is never
    told of an event while another one is being handled.
    """

    def __init__(self, core: PilotCore, carry_out: Callable[[Command], None], *, clock: Callable[[], float]) -> None:
        self._core = core
        self._carry_out = carry_out
        self._clock = clock
        self._events: deque[Event] = deque()
        self._is_handling = False

    def handle(self, event: Event) -> int:
        """Handle an event and those that it leads to; returns how many. 0: another one is being handled, and this one
        comes after it."""
        events = self._events
        if self._is_handling:
            events.append(event)
            return 0
        self._is_handling = True
        if events:  # left by one whose command could not be carried out
            events.append(event)
            event = events.popleft()
        handled = 1
        try:
            for command in self._core.handle(event, self._clock()):
                self._carry_out(command)
            while events:
                handled += 1
                for command in self._core.handle(events.popleft(), self._clock()):
                    self._carry_out(command)
        finally:
            self._is_handling = False
        return handled
