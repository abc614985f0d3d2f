"""Drive a manager core without sockets, with pilots whose libraries load at once."""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from stoker.manager.core.events import Command, Event, FromClient, FromPilot, SetTimer, ToPilot
from stoker.manager.core.reactor import Core
from stoker.protocol import wire
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId, ClientId, LibraryId, PilotId
from stoker.protocol.to_manager import CallsEnded, ClientHello, DeviceFacts, LibraryReady, PilotHello
from stoker.protocol.to_manager import FromClient as ClientMessage
from stoker.protocol.to_manager import FromPilot as PilotMessage
from stoker.protocol.to_pilot import RunCalls, StartLibrary


def collect_as_the_live_loop() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


SESSION, CLIENT = "bench", ClientId("client-ab")


class DrivenCore:
    """`spent_s`: processor time of `Core.handle`. `held`: calls by library; `home`: pilot by library."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.now, self.spent_s = 0.0, 0.0
        self.held: defaultdict[int, list[CallId]] = defaultdict(list)
        self.home: dict[int, PilotId] = {}
        self._frames: Counter[str] = Counter()

    def join(self, *pilots: tuple[PilotId, Sequence[DeviceFacts]]) -> None:
        self.client(ClientHello(wire.VERSION, SESSION), numbered=False)
        for pilot, devices in pilots:
            self.pilot(pilot, PilotHello(wire.VERSION, SESSION, pilot, 1, tuple(devices)), numbered=False)

    def client(self, *messages: ClientMessage, numbered: bool = True) -> None:
        self.give(FromClient(CLIENT, self.number(CLIENT) if numbered else 0, list(messages)))

    def pilot(self, pilot: PilotId, *messages: PilotMessage, numbered: bool = True) -> None:
        self.give(FromPilot(pilot, self.number(pilot) if numbered else 0, list(messages)))

    def number(self, peer: str) -> int:
        self._frames[peer] += 1
        return self._frames[peer]

    def give(self, event: Event) -> None:
        before = time.thread_time()
        commands = self.core.handle(event, self.now)
        self.spent_s += time.thread_time() - before
        self.take(commands)

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if type(command) is SetTimer:
                self.set_timer(command)
            elif type(command) is ToPilot:
                if type(command.message) is RunCalls:
                    self.run_calls(command.pilot, command.message)
                elif type(command.message) is StartLibrary:
                    self.start_library(command.pilot, command.message.library)

    def set_timer(self, timer: SetTimer) -> None:
        """Do nothing: this core has no timers."""

    def run_calls(self, pilot: PilotId, order: RunCalls) -> None:  # noqa: ARG002
        self.held[order.library] += (spec.call for spec in order.calls)

    def start_library(self, pilot: PilotId, library: LibraryId) -> None:
        self.home[library], self.held[library] = pilot, []
        self.pilot(pilot, LibraryReady(library, 0.1, 0.1))

    def end(self, library: int, count: int, *, run_s: float) -> int:
        """End up to `count` calls of a library in one frame. Return their number."""
        calls = self.held[library][:count]
        del self.held[library][:count]
        if calls:
            ends = [CallEnd(call, True, b"result", run_s) for call in calls]
            self.pilot(self.home[library], CallsEnded(LibraryId(library), ends))
        return len(calls)
