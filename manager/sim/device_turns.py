"""The turns of the engines on a simulated pilot, by the function that every pilot runs (`stoker.pilot.core`).

An engine that wants to compute asks for a turn; it gets one step, or as many as follow each other while nobody else
asks for its devices. Calls of contexts without an engine take no turns: they share a device with whatever computes
there (`stoker.manager.sim.device`).
"""

from __future__ import annotations

from typing import Protocol

from stoker.manager.sim.agenda import Agenda
from stoker.pilot.core.turns import TurnRequest, next_turns
from stoker.protocol.ids import DeviceId, LibraryId


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
