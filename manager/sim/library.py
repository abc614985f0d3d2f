"""A simulated library: from its order to its end, in the states and with the turns that a real one has.

`stoker.pilot.core` decides (which state follows which, whose turn it is); this carries it out in virtual time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.contexts.recipe import Awareness, ObjectRef
from stoker.manager.protocol.calls import CallEnd, CallProgress, CallSpec, Failure, FailureKind
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_manager import (
    CallEvicted,
    CallsReturned,
    LibraryGone,
    LibraryNews,
    LibraryPhase,
    LibraryReady,
)
from stoker.manager.protocol.to_pilot import StartLibrary
from stoker.manager.sim.calls_log import items_of
from stoker.manager.sim.device import Work
from stoker.manager.sim.flows import Transfer
from stoker.manager.sim.log import Happened
from stoker.pilot.core.library import LibraryState, State
from stoker.pilot.core.turns import FirstCome
from stoker.units import show_bytes

if TYPE_CHECKING:
    from stoker.manager.sim.pilot import SimPilot


class SimLibrary:
    """One library of a simulated pilot."""

    def __init__(self, pilot: SimPilot, order: StartLibrary) -> None:
        self.pilot = pilot
        self.number = order.library
        self.recipe = order.recipe
        self.model = pilot.sim.world.contexts[order.recipe.name]
        speed = pilot.sim.world.devices[pilot.kind].speed
        self._call_s = self.model.of_kind(self.model.call_s, pilot.kind) / speed
        self._item_s = self.model.of_kind(self.model.item_s, pilot.kind) / speed
        self.state = LibraryState(order.library, order.recipe, order.devices)
        self.turns: FirstCome[CallSpec] = FirstCome()
        self.running: dict[CallId, tuple[CallSpec, Work]] = {}
        self._device = pilot.computes[order.devices[0]]
        self._part = 1 / order.recipe.slots
        self.items = 0
        """Items that this process has begun."""
        self.ordered_at = pilot.sim.agenda.now
        self.started_at = 0.0
        self.told_to_end = False
        self._moves: dict[Transfer, None] = {}
        """What must have come before it goes on."""

    # ---- from the order to the context

    def start(self) -> None:
        """Its objects are here: make a process."""
        if self.state.state is State.GONE:
            return
        self.started_at = self.pilot.sim.agenda.now
        self.state.move(State.STARTING)
        self._news(LibraryPhase.STARTING)
        self.pilot.sim.agenda.after(self.model.start_s, self._load)

    def _load(self) -> None:
        if self.state.state is State.GONE:
            return
        self.state.move(State.LOADING)
        self._news(LibraryPhase.LOADING)
        sim, machine = self.pilot.sim, self.pilot.machine
        for files in self.model.files:
            if self.model.awareness is Awareness.NONE:
                self._move(files.size_bytes, (sim.shared.bytes, machine.shared, machine.inward), self._work)
                sim.log.note(
                    sim.agenda.now, Happened.BYTES_SHARED, pilot=self.pilot.number, value=float(files.size_bytes)
                )
                if files.operations:
                    self._move(files.operations, (sim.shared.operations,), self._work)
            elif self.model.page_cache and files.name in machine.in_memory:
                self._move(files.size_bytes, (machine.memory,), self._work)
            else:
                machine.in_memory[files.name] = None
                self._move(files.size_bytes, (machine.disk,), self._work)
        if not self._moves:
            self._work()

    def _work(self) -> None:
        """Its files are read: what the loader computes."""
        if self._moves or self.state.state is State.GONE:
            return
        model, sim = self.model, self.pilot.sim
        seconds = model.of_kind(model.load_s, self.pilot.kind) * sim.chance_of_loads.factor(
            self.number, cv=model.load_cv
        )
        sim.agenda.after(seconds, self._to_device)

    def _to_device(self) -> None:
        if self.state.state is State.GONE:
            return
        needed, promised = self.model.device_memory_bytes, self.pilot.ledger.held(self.number)
        if promised < needed:
            what = f"{show_bytes(needed)} of device memory are needed, {show_bytes(promised)} were promised"
            self.end(failed=f"the loader of {self.recipe.name} ran out of memory: {what}")
            return
        self._move(needed, (self.pilot.machine.bus,), self._ready)
        if not self._moves:
            self._ready()

    def _ready(self) -> None:
        if self._moves or self.state.state is State.GONE:
            return
        self.state.move(State.READY)
        sim, model = self.pilot.sim, self.model
        now, start_s, memory = sim.agenda.now, float(model.start_s), int(model.device_memory_bytes)
        sim.log.note(
            now, Happened.LIBRARY_READY, library=self.number, pilot=self.pilot.number, value=now - self.ordered_at
        )
        fetch_s = self.started_at - self.ordered_at
        self.pilot.post(
            LibraryReady(self.number, start_s, now - self.started_at - start_s, memory, memory, memory, fetch_s)
        )
        self.pump()

    def _move(self, size: float, path: tuple[object, ...], then: object) -> None:
        if not size:
            return
        transfer: Transfer

        def done() -> None:
            self._moves.pop(transfer, None)
            then()  # type: ignore[operator]

        transfer = self.pilot.sim.network.start(size, [path], done)  # type: ignore[list-item]
        self._moves[transfer] = None

    def _news(self, phase: LibraryPhase) -> None:
        self.pilot.post(LibraryNews(self.number, phase))

    # ---- calls

    def run(self, calls: list[CallSpec], *, limit_s: float) -> None:
        """Calls have come for it."""
        self.state.hold([spec.call for spec in calls], limit_s=limit_s)
        turns, slots, running = self.turns, self.recipe.slots, self.running
        begins = self.state.state is State.READY and not turns
        for spec in calls:
            if begins and len(running) < slots:
                self._begin(spec)
            else:
                turns.add(spec.call, spec)

    def pump(self) -> None:
        """Begin calls while there are slots."""
        slots, running = self.recipe.slots, self.running
        if self.state.state is not State.READY:
            return
        while len(running) < slots:
            turn = self.turns.take()
            if turn is None:
                return
            self._begin(turn[1])

    def _begin(self, spec: CallSpec) -> None:
        sim = self.pilot.sim
        work = self._device.begin(self._seconds(spec), part=self._part, then=self._ended, args=(spec,))
        self.running[spec.call] = spec, work
        sim.calls_log.began(sim.agenda.now, spec, library=self.number, pilot=self.pilot.number)

    def _seconds(self, spec: CallSpec) -> float:
        """How long a call takes here, from its beginning, or from where it was evicted."""
        model, items = self.model, items_of(spec)
        seconds = self._call_s + items * self._item_s
        if model.item_cv:
            seconds *= self.pilot.sim.chance_of_calls.factor(spec.call, cv=model.item_cv)
        if self.items < model.warm_items:
            seconds += min(items, model.warm_items - self.items) * model.warm_item_s
        self.items += items
        return seconds * (1.0 - _done_part(spec)) if spec.progress else seconds

    def _ended(self, spec: CallSpec) -> None:
        call, sim = spec.call, self.pilot.sim
        ran_s = self._device.done(self.running.pop(call)[1])
        self.state.ended((call,))
        sim.calls_log.ended(sim.agenda.now, spec, library=self.number, pilot=self.pilot.number)
        self.pilot.post_end(self.number, CallEnd(call, True, b"", ran_s))
        if self.state.retires or (self.told_to_end and not self.running):
            self.end()
        else:
            self.pump()

    def give_back(self, calls: list[int] | tuple[int, ...]) -> None:
        """Calls that have not begun leave it."""
        back = tuple(self.state.returned([CallId(call) for call in calls]))
        if back:
            self.pilot.post(CallsReturned(self.number, back))

    def evict(self, call: CallId) -> None:
        """Checkpoint a running call and give it back, if it runs."""
        if call not in self.running:
            return
        spec, work = self.running.pop(call)
        part = _done_part(spec)
        part += (1.0 - part) * self._device.stop(work)
        self.pilot.sim.calls_log.stopped(self.pilot.sim.agenda.now, (call,))
        self.state.returned((call,))
        self.pilot.post(CallEvicted(self.number, CallProgress(call, done=part, total=1.0, state=repr(part).encode())))
        self.pump()

    # ---- the end

    def drain(self) -> None:
        """End after what runs; the rest is given back."""
        if self.state.state is not State.READY:
            self.end()
            return
        self.told_to_end = True
        self.state.move(State.DRAINING)
        self.give_back(self.turns.give_back(len(self.turns)))
        if not self.running:
            self.end()

    def end(self, *, failed: str = "") -> None:
        """Its process is over; what it ran and held goes back. `failed`: why, if its loader did."""
        if self.state.state is State.GONE:
            return
        loading = self.state.state not in (State.READY, State.DRAINING)
        running = tuple(self.running)
        self.vanish()
        left = self.state.gone(running)
        failure = Failure(FailureKind.CONTEXT, failed, pilot=self.pilot.id, library=self.number) if failed else None
        self.pilot.post(LibraryGone(self.number, failure, loading, left.running, left.unstarted))
        self.pilot.forget(self)

    def vanish(self) -> None:
        """Stop everything of it, without a word."""
        for _, work in self.running.values():
            self._device.stop(work)
        sim = self.pilot.sim
        sim.calls_log.stopped(sim.agenda.now, self.running)
        self.running.clear()
        for transfer in self._moves:
            sim.network.stop(transfer)
        self._moves.clear()
        sim.log.note(sim.agenda.now, Happened.LIBRARY_ENDED, library=self.number, pilot=self.pilot.number)

    @property
    def wants(self) -> tuple[ObjectRef, ...]:
        """Objects that must be on its pilot's disk before it starts."""
        return self.recipe.objects


def _done_part(spec: CallSpec) -> float:
    """What of a call was done before it was evicted elsewhere."""
    return float(spec.progress) if spec.progress else 0.0
