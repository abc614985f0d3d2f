"""Simulate one run. The manager's core runs in a loop as in the live manager, but without sockets.

The core is strict: if a policy returns an impossible plan, the run stops with an error that shows the core's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from stoker.contexts.step_times import StepTimes
from stoker.errors import StokerError
from stoker.manager.core import events
from stoker.manager.core.events import Command, Event
from stoker.manager.core.reactor import Core
from stoker.manager.core.report import device_seconds_by_tier
from stoker.manager.core.seams import Policies, PolicyError
from stoker.manager.core.story import describe_wait
from stoker.manager.sim.batch import SimulatedBatchSystem
from stoker.manager.sim.client import Arrival, SimClient
from stoker.manager.sim.pilot import PilotSimulationBase, SimPilot
from stoker.manager.sim.virtual_engine import StepCounts
from stoker.manager.sim.world import SourceModel, World
from stoker.protocol import to_client, to_manager, to_pilot, wire
from stoker.protocol.blocks import BlockOrder
from stoker.protocol.ids import ClientId, RecipeKey

_FACTORY = ClientId("factory")
_EVENTS_PER_REPORT = 20_000


class SimulationError(StokerError):
    """Raised when a simulated run cannot continue."""


class RunOutcome(msgspec.Struct, frozen=True):
    """The result of a simulated run. Times are in seconds.

    `complete`: False if the run was cut off, at `ended_at`. `device_s`: device-seconds per tier. `busy_s`, `warm_s`:
    device-seconds with a running call, and with a library (from the load order). `mean_batch`: mean number of requests
    per decode step.
    """

    complete: bool
    ended_at: float
    calls: int
    items: int
    failed: dict[str, int]
    core_events: int
    device_s: dict[str, float]
    lost_pilots: int
    rerun_calls: int
    busy_s: float = 0.0
    warm_s: float = 0.0
    engine_steps: int = 0
    mean_batch: float = 0.0


class Simulation(PilotSimulationBase):
    """Simulates a world with the core of a session's manager. `counted`: log counts of calls instead of each call."""

    def __init__(
        self, world: World, arrivals: Iterable[Arrival], policies: Policies, *, seed: int = 0, counted: bool = False
    ) -> None:
        super().__init__(world, seed=seed, counted=counted, honours=policies.honours)
        self.core = Core(self.session, policies, strict=True)
        self.pilots = {}
        self.message_s = float(world.delays.message_s)
        self._step_times: dict[tuple[int, float], StepTimes] = {}
        self.core_events = 0
        self._pilot_count = 0
        self.client = SimClient(self, arrivals)
        self._batch = {
            model.name: SimulatedBatchSystem(self, model, number=number, seed=seed)
            for number, model in enumerate(world.sources)
        }

    def run(self, *, until_s: float = math.inf, tell: Callable[[float, int], None] | None = None) -> RunOutcome:
        """Simulate until the last call has ended, or `until_s`. `tell` receives the time and number of ended calls."""
        self._carry_out(self.core.start())
        self.handle(events.SessionDefined(tuple(batch.source for batch in self._batch.values())))
        self.handle(
            events.FromClient(
                _FACTORY, 0, [to_manager.ClientHello(wire.VERSION, self.session, observer=True, factory=True)]
            )
        )
        self.client.start()
        agenda = self.agenda
        while not self.client.is_done and agenda.next_entry_at <= until_s:
            if not agenda.run_entries(_EVENTS_PER_REPORT, until_s=until_s):
                raise SimulationError(f"the simulation is stuck at {agenda.now:g} s: {self._explain_stuck_run()}")
            if tell is not None:
                tell(agenda.now, self.client.ended)
        return self._create_run_outcome(min(agenda.now if self.client.is_done else until_s, until_s))

    def _create_run_outcome(self, ended_at: float) -> RunOutcome:
        self.calls_log.close(ended_at)
        state = self.core.state
        state.now = ended_at
        steps = StepCounts()
        for counts in (
            self.engine_steps,
            *(counts for pilot in self.pilots.values() for counts in pilot.engine_step_counts()),
        ):
            steps.add(counts)
        return RunOutcome(
            complete=self.client.is_done, ended_at=ended_at, calls=self.client.ended, items=self.client.items_done,
            failed=self.client.failed, core_events=self.core_events, device_s=device_seconds_by_tier(state),
            lost_pilots=state.lost_pilots, rerun_calls=state.rerun_calls,
            busy_s=self.busy_s + sum(pilot.busy_s(ended_at) for pilot in self.pilots.values()),
            warm_s=self.warm_s + sum(pilot.warm_s(ended_at) for pilot in self.pilots.values()),
            engine_steps=steps.steps,
            mean_batch=steps.row_steps / steps.decode_steps if steps.decode_steps else 0.0,
        )  # fmt: skip

    def _explain_stuck_run(self) -> str:
        open_calls = self.client.submitted - self.client.ended
        call = next(iter(self.core.state.calls.values()), None)
        why = (
            describe_wait(self.core.state, call.group.context) if call is not None else "the manager does not know them"
        )
        return f"{open_calls} calls wait ({why})"

    def handle(self, event: Event) -> None:
        self.core_events += 1
        try:
            commands = self.core.handle(event, self.agenda.now)
        except PolicyError as error:
            raise SimulationError(
                f"at {self.agenda.now:g} s a policy requested an impossible action: {error}\n{_show_state(self.core)}"
            ) from error
        self._carry_out(commands)

    def _carry_out(self, commands: Iterable[Command]) -> None:
        agenda = self.agenda
        for command in commands:
            if type(command) is events.ToPilot:
                pilot = self.pilots.get(command.pilot)
                if pilot is not None and type(command.message) is not to_pilot.Ack:
                    agenda.schedule_after(self.message_s, pilot.handle_message, command.message)
            elif type(command) is events.ToClient:
                if command.client == _FACTORY:
                    self._send_to_factory(command.message)
                elif type(command.message) is to_client.Results:
                    self.client.handle_results(command.message)
            elif type(command) is events.SetTimer:
                # Round up: if a timer fired a fraction of a microsecond early, the core would set it again forever.
                at = max(math.ceil(command.at * 1e6) / 1e6, agenda.now)
                agenda.schedule_at(at, self._fire_timer, command.key, command.at)
            elif type(command) is events.AskAdvice and isinstance(command.about, events.OfContext):
                self._send_step_times(command.about.recipe)
            # Other commands, such as writing files, are carried out only by the live manager.

    def _send_step_times(self, recipe: RecipeKey) -> None:
        by_kind = {
            kind: events.ContextAdvice(steps=self._step_times_on_device_kind(engine.times, kind))
            for kind, engine in self.world.contexts[recipe].engine.items()
        }  # fmt: skip
        if by_kind:
            self.agenda.schedule_after(
                0.0, self.handle, events.AdviceArrived(events.OfContext(recipe), events.CostAdvice(by_kind))
            )

    def _step_times_on_device_kind(self, times: StepTimes, kind: str) -> StepTimes:
        """Return the step times at a device kind's speed. The same table and speed give the same object."""
        device = self.world.devices.get(kind)
        if device is None or device.speed == 1.0:
            return times
        same = id(times), device.speed
        if same not in self._step_times:
            self._step_times[same] = times.scale_to_speed(device.speed)
        return self._step_times[same]

    def _fire_timer(self, key: str, at: float) -> None:
        if self.core.state.timers.get(key) == at:
            self.handle(events.TimerFired(key))

    def _send_to_factory(self, message: to_client.ToClient) -> None:
        match message:
            case to_client.SubmitBlocks(orders=orders):
                for order in orders:
                    self._batch[order.source].submit(order)
            case to_client.CancelBlocks(blocks=blocks):
                for block in blocks:
                    self._batch[self.core.state.blocks[block].source.source.name].cancel(block)
            case to_client.KnownBlocks(blocks=known):
                for one in known:
                    self._batch[one.source].submit(BlockOrder(one.block, one.source))

    def send_block_update(self, update: to_manager.BlockUpdate) -> None:
        self.handle(events.FromClient(_FACTORY, 0, [update]))

    def create_pilot(self, source: SourceModel, *, block: str, ends_at: float) -> SimPilot:
        number = self._pilot_count
        self._pilot_count += 1
        pilot = SimPilot(self, source, block=block, number=number, ends_at=ends_at)
        self.pilots[pilot.id] = pilot
        return pilot

    def handle_ended_pilot(self, pilot: SimPilot) -> None:
        self.pilots.pop(pilot.id, None)
        for batch in self._batch.values():
            batch.forget_ended_pilot(pilot)


def _show_state(core: Core) -> str:
    state = core.state
    lines = [f"{len(state.calls)} calls open, {len(state.pilots)} pilots, {len(state.libraries)} libraries"]
    for pilot in list(state.pilots.values())[:20]:
        for device in pilot.devices.values():
            held = ", ".join(
                f"lib-{library.id} {library.context.recipe.name} {library.state.value} {library.promised_bytes} B"
                for library in device.libraries.values()
            )
            free = f"{device.free_bytes} of {device.facts.memory_bytes} B free"
            lines.append(f"  {pilot.id} {device.id}: {free}; {held or 'empty'}")
    return "\n".join(lines)
