"""Model a manager core, pilot cores, the messages between these cores, and the true state: running calls and used
device memory.

A process carries out an order, for example to end or to shrink, some time after the arrival of the order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import msgspec
from conformance.processes import ModelProcess
from core.builders import Cluster, devices
from core.desk import SESSION
from core.pilot_shell import CoreHost

from stoker.manager.core.events import Command, FromPilot, PilotCut, PilotLost, ToPilot
from stoker.manager.core.libraries import host_bytes_for_sleep
from stoker.manager.core.nouns import Device, LibraryState, PilotState
from stoker.manager.core.seams import Action, Changes, Policies, Resize, Sleep, Unload, View
from stoker.manager.policies import ExternalPilots, HottestFirst, LoadWhereWanted
from stoker.manager.policies.sleeping import may_sleep
from stoker.pilot.agent.agent import collect_unacknowledged_facts
from stoker.pilot.core import commands, events
from stoker.pilot.core.state import PilotFacts, Timers
from stoker.protocol import to_agent, to_library, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import CallId, LibraryId, PilotId
from stoker.protocol.wire import Outbox

GB = 10**9
DEVICES = 2
IDLE_S = 2.0
SLEEP = ("small", "large", "read")  # Contexts that can sleep
KEEPS, SAVES = GB // 4, GB // 10
"""Device bytes that a sleeping library keeps, and reserved host bytes that it does not use."""
SLEEPER_BYTES = GB // 2

OF_NONE = "message of a library that the pilot does not have"

_decode = wire.from_pilot_decoder()


class GiveAndTake(LoadWhereWanted):
    """The default residency that also puts idle libraries to sleep or unloads them. For a while after a load, the
    policy shrinks one library per device and gives its memory to another library in the same plan.
    """

    period_s = 1.0

    def on_round(self, view: View, changes: Changes) -> Iterator[Action]:
        for pilot in list(view.pilots.values()):
            if pilot.state is PilotState.HERE:
                for device in pilot.devices.values():
                    yield from self._shift(view, device)
                for library in list(pilot.libraries.values()):
                    if library.state is LibraryState.READY and not library.load and view.now > library.used_at + IDLE_S:
                        sleeps = may_sleep(library) and host_bytes_for_sleep(library) <= pilot.free_host_bytes_for_sleep
                        yield Sleep(library.id) if sleeps else Unload(library.id, "idle for long")

    def _shift(self, view: View, device: Device) -> list[Action]:
        ready = [x for x in device.libraries.values() if x.state is LibraryState.READY and not x.unanswered_resizes]
        if len(ready) < 2 or view.now - max(x.ready_at for x in ready) > 5.0:
            return []
        largest, other = sorted(ready, key=lambda x: (-x.promised_bytes, x.id))[:2]
        room = largest.promised_bytes - GB + device.budget_bytes
        return [Resize(largest.id, GB), Resize(other.id, other.promised_bytes + room)] if room > 0 else []


def policies() -> Policies:
    return Policies(HottestFirst(), GiveAndTake(), ExternalPilots())


def devices_of(name: str) -> tuple[say.DeviceFacts, ...]:
    if name == "p0":
        return devices(DEVICES)
    return tuple(msgspec.structs.replace(device, process_bytes=KEEPS) for device in devices(DEVICES, kind="A10"))


class Process(ModelProcess):
    """The process of a library. `settle` carries out orders about memory, sleep and end."""

    def __init__(self, pilot: Wired, ordered: to_pilot.StartLibrary) -> None:
        super().__init__(ordered.library, pilot.queue.handle_event)
        self.devices = ordered.devices
        self.memory_bytes = ordered.device_memory_bytes
        self.exits = False  # True if the process will end
        self._pilot = pilot
        self._signal = 0
        self._left = ordered.recipe.calls_per_library or 10**9
        self._resizes: list[int] = []
        self.recipe = ordered.recipe
        self.host_bytes = 0
        self.cannot_move = False  # True if the context raises on sleep and wake
        self._moves: list[to_library.Sleep | to_library.Wake] = []

    def hear(self, message: to_library.ToLibrary) -> None:
        if self.exits:
            return
        match message:
            case to_library.Run(calls=specs):
                for spec in specs:
                    self._pilot.cluster.begins(self._pilot, self.number, spec.call)
                super().hear(message)
            case to_library.Resize(device_memory_bytes=size):
                self._resizes.append(size)
                self.memory_bytes = max(self.memory_bytes, size)  # the process may use this memory from now on
            case to_library.Sleep():
                # The process may use all host bytes.
                self.host_bytes = self._pilot.core.state.host_memory.reserved_bytes(self.number)
                self._moves.append(message)
            case to_library.Wake():
                self.memory_bytes = self._pilot.core.state.ledger.reserved_bytes(self.number)
                self._moves.append(message)
            case _:
                super().hear(message)

    def load(self) -> None:
        if not self.exits:
            self.say(
                to_agent.Hello(self.number, 7),
                to_agent.Loaded(0.0, KEEPS, KEEPS, KEEPS, sleeps=self.recipe.name in SLEEP),
            )

    def _move(self, order: to_library.Sleep | to_library.Wake) -> None:
        if self.cannot_move:
            self.say(to_agent.SleepFailed(Failure(FailureKind.CONTEXT, "it raised")))
            self.die(signal=0)
        elif isinstance(order, to_library.Sleep):
            self.memory_bytes = KEEPS
            takes = self.host_bytes - min(self.host_bytes, SAVES)
            on_host = self._pilot.core.state.devices[self.devices[0]].on_host
            self.host_bytes = 0 if on_host else takes
            self.say(to_agent.Slept(KEEPS, takes, 0, 0.1))
        else:
            self.host_bytes = 0
            self.say(to_agent.Woke(0.1))

    def end_one(self) -> None:
        if self.calls and not self.exits:
            self._left -= 1
            self.end(self.calls[0])
            if not self._left:
                self.die(signal=0)

    def die(self, signal: int = 9) -> None:
        self.exits, self._signal = True, signal

    def settle(self) -> None:
        for size in self._resizes:
            self.memory_bytes = size
            self.say(to_agent.Resized(size))
        self._resizes.clear()
        moves, self._moves = self._moves, []
        for order in moves:
            self._move(order)
        if self.exits:
            del self._pilot.processes[self.number]
            super().die(self._signal)


class Wired(CoreHost):
    def __init__(self, name: str, cluster: Together) -> None:
        self.name = PilotId(name)
        self.cluster = cluster
        facts = PilotFacts(
            pilot=name, session=SESSION, host=name, pid=1, peer=f"{name}:1",
            devices=devices_of(name), cache_bound_bytes=1 << 60,
            sleeper_bytes=SLEEPER_BYTES,
        )  # fmt: skip
        super().__init__(facts, clock=lambda: cluster.now)
        self.timers = Timers()
        self.outbox = Outbox()
        self.batch: list[say.FromPilot] = []
        self.up: deque[bytes] = deque()  # Frames in transit to the manager
        self.down: deque[to_pilot.ToPilot] = deque()  # Orders in transit to the pilot
        self.last = b""  # The last delivered frame
        self.fetching: dict[str, to_pilot.FetchObject] = {}
        self.told_gone: set[LibraryId] = set()
        self.calls_of_given_up_pilot: set[tuple[LibraryId, CallId]] = set()
        """Calls of this pilot when the manager declared the pilot lost; these calls may run elsewhere."""
        self.is_connected = self.is_over = False
        self.connect()

    # ---- the connection
    def connect(self) -> None:
        self._flush()
        self.is_connected = True
        self.tell(
            events.HelloDue(
                collect_unacknowledged_facts(self.outbox.unacknowledged_frames()),
                self.outbox.acknowledged,
                tuple(self.cache),
            )
        )

    def cut(self) -> None:
        self.is_connected = False
        self.up.clear()
        self.down.clear()

    def hear(self, *, lists_cache: bool = False) -> bool:
        """Deliver the next order; False without an order. `lists_cache`: list the cache when a library with objects
        starts.
        """
        if not self.down:
            return False
        order = self.down.popleft()
        self._note_crossing(order)
        if not self.is_over:
            self.queue.handle_event(events.FromManager(order))
            if lists_cache and isinstance(order, to_pilot.StartLibrary) and order.recipe.objects:
                self.queue.handle_event(events.CacheListed(self.cache))
            self.flush()
        return True

    def _note_crossing(self, order: to_pilot.ToPilot) -> None:
        """Count orders that arrive after their library or call ended: the manager refuses the answer of the pilot."""
        libraries, crossed = self.core.state.libraries, self.cluster.crossed
        match order:
            case to_pilot.StopLibrary(library=number) if number not in libraries:
                self.told_gone.discard(number)
                crossed[OF_NONE] += 1
            case to_pilot.RunCalls(library=number) if number not in libraries:
                crossed[OF_NONE] += 1
            case to_pilot.StartLibrary() if self.core.state.leaving:
                crossed[OF_NONE] += 1  # the refusal may arrive after a hello without this library
            case _:
                pass

    def tell(self, event: events.Event) -> None:
        self.queue.handle_event(event)
        self.flush()

    def flush(self) -> None:
        self._flush()
        if self.is_connected and self.core.state.hello_is_due:
            self.connect()

    def _flush(self) -> None:
        if self.batch:
            number = self.outbox.take_next_number()
            frame = wire.encode(self.batch, sequence=number)
            self.batch = []
            self.outbox.keep(number, frame)
            if self.is_connected:
                self.up.append(frame)

    # ---- commands
    def carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.SendToManager(message=message):
                if isinstance(message, say.LibraryGone):
                    assert message.library not in self.told_gone, f"lib-{message.library} has ended twice"
                    self.told_gone.add(message.library)
                self.batch.append(message)
            case commands.SendHello(hello=hello):
                self.up.append(wire.encode([hello]))
                self.up.extend(self.outbox.unacknowledged_frames())
            case commands.DropAcknowledgedFrames(sequence=sequence):
                self.outbox.acknowledge(sequence)
            case commands.StartFetch(order=order):
                self.fetching[order.object.name] = order
            case commands.StopFetch(name=name):
                self.fetching.pop(name, None)
            case commands.StartProcess(ordered=ordered):
                assert ordered.library not in self.processes, f"lib-{ordered.library} is started twice"
                self.processes[ordered.library] = Process(self, ordered)
            case commands.ObserveLibrary(library=number):
                running = self.processes[number].calls[:1] if number in self.processes else []
                self.queue.handle_event(
                    events.LibrariesObserved([events.Observation(number, [(call, 0.0) for call in running])])
                )
            case commands.SetTimer(at=at, key=key):
                self.timers.set_timer(at, key)
            case commands.ExitPilot():
                self.is_over = True
                ran = {number: tuple(process.calls[:1]) for number, process in self.processes.items()}
                self.processes.clear()
                self.queue.handle_event(events.Farewell(ran))
            case _:
                super().carry_out(command)

    # ---- processes and files
    def settle(self) -> None:
        """Let the processes carry out their orders."""
        for process in list(self.processes.values()):
            process.settle()
        for order in list(self.fetching.values()):
            self._fetch(order)
        self._flush()

    def _fetch(self, order: to_pilot.FetchObject) -> None:
        """Read an object from the first peer that has it, or from its origin."""
        name, size = order.object.name, order.object.size_bytes
        lacking = []
        for peer in order.peers:
            other = self.cluster.wired[peer.pilot]
            if name in other.cache and not other.is_over:
                break
            lacking.append(peer.pilot)
        else:
            if not order.origin:
                for id in lacking:
                    self.queue.handle_event(events.SourceFailed(name, "it does not have it", id))
                return
        del self.fetching[name]
        self.cache[name] = size
        self.queue.handle_event(events.ObjectArrived(name, size))

    def works(self, *, ends: int = 1) -> None:
        """Let each process load, run `ends` calls, and carry out orders."""
        for process in list(self.processes.values()):
            process.load()
            for _ in range(ends):
                process.end_one()
        self.settle()

    def signal(self) -> None:
        self.tell(events.SignalReceived("it got SIGTERM"))

    def time_passes(self) -> None:
        if not self.is_over:
            for key in self.timers.take_due(self.cluster.now):
                self.tell(events.TimerFired(key))
            self.tell(events.CacheListed(self.cache))
            self.tell(events.Tick())

    def validate(self) -> None:
        """Check that device memory is not reserved or used twice."""
        self.core.state.ledger.validate()
        used: Counter[str] = Counter()
        for process in self.processes.values():
            used.update(dict.fromkeys(process.devices, process.memory_bytes))
        for device, facts in self.core.state.devices.items():
            assert used[device] <= facts.memory_bytes, f"{used[device]} bytes of {device} of {self.name} are used"
        self.core.state.host_memory.validate()
        on_host = sum(process.host_bytes for process in self.processes.values())
        assert on_host <= SLEEPER_BYTES, f"{on_host} bytes of host memory of {self.name} are used"


class Together(Cluster):
    """The manager, the client and the pilots. Messages are in transit until a test delivers them."""

    def __init__(self) -> None:
        self.wired: dict[str, Wired] = {}
        self.crossed: Counter[str] = Counter()
        """Answers that the manager may refuse because its order arrived too late, counted by reason."""
        super().__init__(policies=policies, validates=False)  # the state machine validates after each rule

    def _post(self, orders: list[Command]) -> None:
        rest = []
        for command in orders:
            if not isinstance(command, ToPilot):
                rest.append(command)
                continue
            message = command.message
            if isinstance(message, to_pilot.RunCalls):
                for spec in message.calls:
                    assert self.names[spec.call] not in self.ended, f"{self.names[spec.call]} has ended and is sent"
            pilot = self.wired.get(command.pilot)
            if pilot is not None and pilot.is_connected:
                pilot.down.append(message)
        super()._post(rest)

    # ---- deliveries
    def hear_next(self, pilot: Wired) -> bool:
        if not pilot.up:
            return False
        pilot.last = pilot.up.popleft()
        self._hear(pilot, pilot.last)
        return True

    def hear_again(self, pilot: Wired) -> None:
        if pilot.last and _decode(pilot.last).sequence:
            self._hear(pilot, pilot.last)

    def _hear(self, pilot: Wired, data: bytes) -> None:
        frame = _decode(data)
        self.event(FromPilot(pilot.name, frame.sequence, list(frame.messages)))
        known = self.core.state.pilots.get(pilot.name)
        if known is not None:
            for library in known.libraries.values():
                # The manager knows again that this pilot has these calls.
                pilot.calls_of_given_up_pilot.difference_update((library.id, call) for call in library.held)

    def pilot_cut(self, pilot: Wired) -> None:
        pilot.cut()
        self.event(PilotCut(pilot.name))

    def give_up(self, pilot: Wired) -> None:
        pilot.cut()
        for library in pilot.core.state.libraries.values():
            pilot.calls_of_given_up_pilot.update((library.number, call) for call in library.held_calls)
        self.event(PilotLost(pilot.name, "silent for 15 s"))

    # ---- the true state
    def begins(self, pilot: Wired, number: LibraryId, call: CallId) -> None:
        """Check that a started call runs in no other process, except on a pilot declared lost."""
        for other in self.wired.values():
            for process in other.processes.values():
                is_elsewhere = process.number != number or other is not pilot
                assert call not in process.calls or (
                    is_elsewhere and (process.number, call) in other.calls_of_given_up_pilot
                ), (
                    f"{self.names[call]} runs in lib-{process.number} of {other.name}, and begins in lib-{number} of"
                    f" {pilot.name}"
                )

    def all_arrives(self) -> None:
        """Deliver the messages in transit and their answers until none is left."""
        for _ in range(300):
            moved = False
            for pilot in list(self.wired.values()):
                moved |= self.hear_next(pilot)
                moved |= pilot.hear()
            if not moved:
                return
        raise AssertionError("they go on talking")
