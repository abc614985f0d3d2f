"""A simulated library: from its order to its end, in the states and with the turns that a real one has.

`stoker.pilot.core` decides (which state follows which, whose turn it is); this carries it out in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from stoker.contexts.recipe import Awareness, ObjectRef
from stoker.manager.protocol.calls import CallEnd, CallSpec, Failure, FailureKind, GangPlace
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
from stoker.manager.sim.calls_log import Where, items_of
from stoker.manager.sim.device import Work, begin_together
from stoker.manager.sim.flows import Transfer
from stoker.manager.sim.log import Happened
from stoker.manager.sim.runs import CallRun, SoloRun, ordered_run, planned
from stoker.pilot.core.library import LibraryState, State
from stoker.pilot.core.turns import FirstCome
from stoker.units import show_bytes

if TYPE_CHECKING:
    from stoker.manager.sim.pilot import SimPilot


_Part = tuple[int, CallRun]
"""A member's rank, and the run that it is to join."""


class SimLibrary:
    """One library of a simulated pilot."""

    def __init__(self, pilot: SimPilot, order: StartLibrary) -> None:
        self.pilot = pilot
        self.number = order.library
        self.recipe = order.recipe
        self.model = pilot.sim.world.contexts[order.recipe.name]
        speed = pilot.sim.world.devices[pilot.kind].speed
        self.call_s = self.model.of_kind(self.model.call_s, pilot.kind) / speed
        self.item_s = self.model.of_kind(self.model.item_s, pilot.kind) / speed
        self.state = LibraryState(order.library, order.recipe, order.devices)
        self.turns: FirstCome[tuple[CallSpec, _Part | None]] = FirstCome()
        self.running: dict[CallId, CallRun | SoloRun] = {}
        """Calls that take a slot: they run, or wait for the rest of their gang."""
        self.devices = tuple([pilot.computes[device] for device in order.devices])
        self.part = 1 / order.recipe.slots
        """What a call wants of each device."""
        alone = self.devices[0].begin if len(self.devices) == 1 else partial(begin_together, self.devices)
        self._compute: Callable[..., Work] = alone
        self.where = Where(order.library, pilot.number, len(order.devices))
        self._items = 0
        """Items that this process has begun."""
        self.ordered_at = pilot.sim.agenda.now
        self.started_at = 0.0
        self.told_to_end = False
        self._moves: dict[Transfer, None] = {}
        """What must have come before it goes on."""
        for device in self.devices:
            device.hold()

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
        self._move(needed * len(self.devices), (self.pilot.machine.bus,), self._ready)
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

    def run(self, calls: list[CallSpec], *, gang: GangPlace | None = None, limit_s: float) -> None:
        """Calls have come for it, or its part of a gang's."""
        self.state.hold([spec.call for spec in calls], limit_s=limit_s)
        turns, slots, running = self.turns, self.recipe.slots, self.running
        begins = self.state.state is State.READY and not turns
        for spec in calls:
            part = None
            if gang is not None and gang.size > 1:
                part = gang.rank, ordered_run(self.pilot.sim, spec, size=gang.size)
            if begins and len(running) < slots:
                self._begin(spec, part)
            else:
                turns.add(spec.call, (spec, part))

    def pump(self) -> None:
        """Begin calls while there are slots."""
        slots, running = self.recipe.slots, self.running
        if self.state.state is not State.READY:
            return
        while len(running) < slots:
            turn = self.turns.take()
            if turn is None:
                return
            self._begin(*turn[1])

    def _begin(self, spec: CallSpec, part: _Part | None) -> None:
        sim, call = self.pilot.sim, spec.call
        if part is not None:
            rank, run = part
            self.running[call] = run
            run.join(self, rank=rank)
        elif sim.progress_s:
            self.running[call] = run = CallRun(sim, spec, size=1)
            run.join(self, rank=0)
        else:
            work = self._compute(self._seconds(spec), part=self.part, then=self._solo_ended, args=(spec,))
            self.running[call] = SoloRun(spec, work)
            sim.calls_log.began(sim.agenda.now, spec, self.where, rank=0)

    def _seconds(self, spec: CallSpec) -> float:
        """How long a call takes here by itself."""
        sim, model, features = self.pilot.sim, self.model, spec.features
        items = sim.items_of(spec) if sim.really else items_of(spec)
        if spec.progress or (features is not None and features.fixed_s):
            seconds = planned(sim, spec, (self,)).whole_s
        else:
            seconds = self.call_s + items * self.item_s
            if model.item_cv:
                seconds *= sim.chance_of_calls.factor(spec.call, cv=model.item_cv)
        if self._items < model.warm_items:
            seconds += self.warm_up(items) * model.warm_item_s
        return seconds

    def _solo_ended(self, spec: CallSpec) -> None:
        sim, run = self.pilot.sim, self.running[spec.call]
        ran_s = self.devices[0].done(run.work)
        items = sim.items_of(spec) if sim.really else items_of(spec)
        sim.calls_log.ended(sim.agenda.now, spec, self.where, rank=0, items=items)
        self.ended(spec.call, ran_s=ran_s)

    def warm_up(self, items: int) -> int:
        """It begins so many items; returns how many of them take longer, because its process is fresh."""
        cold = min(items, self.model.warm_items - self._items) if self._items < self.model.warm_items else 0
        self._items += items
        return cold

    def ended(self, call: CallId, *, ran_s: float) -> None:
        """A call has ended, or its part of it."""
        del self.running[call]
        self.state.ended((call,))
        self.pilot.post_end(self.number, CallEnd(call, True, b"", ran_s))
        self._goes_on()

    def _goes_on(self) -> None:
        """A slot is free."""
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
        run = self.running.pop(call, None)
        if run is None:
            return
        progress = run.leave(self, keep=True)
        self.state.returned((call,))
        self.pilot.post(CallEvicted(self.number, progress))
        self._goes_on()

    def stop(self, calls: tuple[CallId, ...]) -> None:
        """Those of these calls that run end by themselves, because they were asked to; they count for nothing."""
        stopped = tuple(call for call in calls if call in self.running)
        for call in stopped:
            self.running.pop(call).leave(self)
        self.give_back(stopped)
        self._goes_on()

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
        sim = self.pilot.sim
        for run in self.running.values():
            run.leave(self)
        self.running.clear()
        for device in self.devices:
            device.let_go()
        for transfer in self._moves:
            sim.network.stop(transfer)
        self._moves.clear()
        sim.log.note(sim.agenda.now, Happened.LIBRARY_ENDED, library=self.number, pilot=self.pilot.number)

    @property
    def wants(self) -> tuple[ObjectRef, ...]:
        """Objects that must be on its pilot's disk before it starts."""
        return self.recipe.objects
