"""Run a pilot core without I/O: tests send events and read commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stoker.contexts.recipe import Recipe
from stoker.pilot.core import commands, events
from stoker.pilot.core.reactor import EventQueue, PilotCore
from stoker.pilot.core.state import PilotFacts, PilotLibrary
from stoker.protocol import to_agent
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec
from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId
from stoker.protocol.to_manager import DeviceFacts
from stoker.protocol.to_pilot import PilotWelcome, RunCalls, StartLibrary

GIB = 1 << 30
C = TypeVar("C")
DEVICES = (DeviceFacts(DeviceId("gpu:0"), "A10", 24 * GIB), DeviceFacts(DeviceId("gpu:1"), "A10", 24 * GIB))


class CoreHost:
    """A pilot core, and models of its processes. Subclasses carry out the other commands."""

    def __init__(self, facts: PilotFacts, *, clock: Callable[[], float]) -> None:
        self.core = PilotCore(facts)
        self.queue = EventQueue(self.core, self.carry_out, clock=clock)
        self.processes: dict[LibraryId, Any] = {}
        self.cache: Any = {}  # Names of the cached objects

    def carry_out(self, command: commands.Command) -> None:
        tell = self.queue.handle_event
        match command:
            case commands.SendToLibrary(library=number, message=message) if number in self.processes:
                self.processes[number].hear(message)
            case commands.KillProcess(library=number) | commands.KillZygote(library=number) if number in self.processes:
                self.processes[number].die()
            case commands.PrepareLibrary(ordered=ordered):
                tell(events.LibraryPrepared(ordered.library, free_disk_bytes=GIB))
            case commands.PinObjects(library=number, objects=refs):
                tell(
                    events.ObjectsPinned(
                        number, {ref.name: f"/cache/{ref.name}" for ref in refs if ref.name in self.cache}
                    )
                )
            case commands.InspectOffer(order=order):
                tell(events.OfferInspected(order))


class CoreShell(CoreHost):
    """A pilot core that finds objects of `cache` at once and starts processes at once."""

    def __init__(self, devices: tuple[DeviceFacts, ...] = DEVICES, **facts: Any) -> None:
        given = {"cache_bound_bytes": 100 * GIB, "logs": "/logs", "objects": "/session/objects", **facts}
        super().__init__(
            PilotFacts(pilot="p1", session="s", host="h", pid=7, devices=devices, **given), clock=lambda: self.now
        )
        self.now = 100.0
        self.cache: set[str] = set()
        self.is_slow = False  # True if tests send the answers of cache and processes
        self.wanted: list[commands.Command] = []  # Unread commands of the core

    # ---- events
    def give(self, event: events.Event) -> CoreShell:
        self.queue.handle_event(event)
        return self

    def carry_out(self, command: commands.Command) -> None:
        self.wanted.append(command)
        if isinstance(command, commands.PrepareLibrary | commands.PinObjects) and not self.is_slow:
            super().carry_out(command)

    def wait(self, seconds: float) -> CoreShell:
        self.now += seconds
        return self

    def hear(self, message: Any) -> CoreShell:
        return self.give(events.FromManager(message))

    def say(self, number: int, *messages: Any) -> CoreShell:
        return self.give(events.FromLibrary(LibraryId(number), messages))

    def join(self) -> CoreShell:
        self.give(events.HelloDue(events.UnacknowledgedFacts(), 0, ()))
        return self.hear(PilotWelcome("s", 5.0, 60.0))

    def start(self, number: int = 1, recipe: Recipe | None = None, *, device: str = "gpu:0", **more: Any) -> CoreShell:
        made = recipe or Recipe(key="k", name="model")
        return self.hear(StartLibrary(LibraryId(number), made, (DeviceId(device),), **more))

    def load(self, number: int = 1, *, device_bytes: int = 0) -> CoreShell:
        self.give(events.ProcessMade(LibraryId(number), 1000 + number)).say(
            number, to_agent.Hello(number, 1000 + number)
        )
        return self.say(number, to_agent.Loaded(1.0, GIB, GIB, device_bytes))

    def ready(self, number: int = 1, recipe: Recipe | None = None, **more: Any) -> CoreShell:
        return self.start(number, recipe, **more).load(number)

    def run(
        self, *calls: int, library: int = 1, limit_s: float = 0.0, payload: Any = b"x", stream: bool = False
    ) -> CoreShell:
        specs = [CallSpec(CallId(call), payload) for call in calls]
        options = CallOptions(limit_s=limit_s, stream=stream)
        return self.hear(RunCalls(LibraryId(library), FunctionKey("f"), specs, options))

    def end(self, *calls: int, library: int = 1) -> CoreShell:
        return self.say(library, to_agent.RunsEnded([CallEnd(CallId(call), ok=True) for call in calls]))

    def die(self, number: int = 1, **how: Any) -> CoreShell:
        return self.give(events.ProcessEnded(LibraryId(number), **how))

    def observe(self, number: int = 1, **running: float) -> CoreShell:
        seen = [(CallId(int(name[1:])), seconds) for name, seconds in running.items()]
        return self.give(events.LibrariesObserved([events.Observation(LibraryId(number), seen)]))

    # ---- commands of the core
    def take(self, kind: type[C]) -> C:
        """Return the only unread command or message of a kind."""
        found = self.all(kind)
        assert len(found) == 1, f"{len(found)} of {kind.__name__}: {found}"
        return found[0]

    def all(self, kind: type[C]) -> list[C]:
        found, rest = [], []
        for command in self.wanted:
            inner = command.message if isinstance(command, commands.SendToManager | commands.SendToLibrary) else command
            if isinstance(inner, kind):
                found.append(inner)
            else:
                rest.append(command)
        self.wanted = rest
        return found

    def forget(self) -> CoreShell:
        self.wanted.clear()
        return self

    def library(self, number: int = 1) -> PilotLibrary:
        return self.core.state.libraries[LibraryId(number)]


class EvenCost:
    """Step times: 1 ms to read a token, `decode` seconds per decode step."""

    def __init__(self, decode: float = 0.05) -> None:
        self._decode_s = decode

    def prefill_s(self, tokens: int, length: float) -> float:
        assert length == tokens / 2
        return tokens / 1000

    def decode_s(self, rows: int, length: float) -> list[float]:
        assert rows > 0
        assert length > 0
        return [self._decode_s]
