"""Run fake pilots that speak the protocol over real sockets without running calls.

    python -m benchmarks.reliability.fake_pilots --session DIR --pilots 2000 --devices 2 [--hold-after 1000]

With `--hold-after N` only the first N calls end; later calls wait for SIGUSR1. Prints JSON with the number of calls
received again after their end.
"""

from __future__ import annotations

import json
import resource
import select
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import zmq

from benchmarks.harness import side_options
from stoker.dealer import CurveKeys, open_socket
from stoker.pilot.agent.agent import collect_unacknowledged_facts
from stoker.pilot.core import commands, events
from stoker.pilot.core.reactor import EventQueue, PilotCore
from stoker.pilot.core.state import PilotFacts
from stoker.protocol import to_agent, to_library, wire
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId, DeviceId, LibraryId
from stoker.protocol.session import KeyPair, SessionFolder
from stoker.protocol.to_manager import DeviceFacts, FromPilot
from stoker.protocol.wire import Outbox

HEARTBEAT_S = 5.0
_MB = 1_000_000
_LARGE = 1 << 62
_NOTHING = b"\x80\x04N."
_decode = wire.to_pilot_decoder()


@dataclass
class Ledger:
    """Calls of all pilots. `ended`: calls that have ended; `again`: number of calls received again after their end."""

    hold_after: int
    ended: set[int] = field(default_factory=set)
    again: int = 0

    @property
    def holds(self) -> bool:
        return 0 <= self.hold_after <= len(self.ended)


class FakePilot:
    def __init__(
        self, context: zmq.Context[Any], folder: SessionFolder, name: str, *, devices: int, ledger: Ledger
    ) -> None:
        there, pair = folder.read(), folder.read_key("pilot")
        self.ledger = ledger
        devices_here = tuple(DeviceFacts(DeviceId(f"cpu:{number}"), "cpu", 8_000_000_000) for number in range(devices))
        facts = PilotFacts(
            pilot=name, session=there.session, host=name, pid=1, devices=devices_here, cache_bound_bytes=_LARGE
        )
        self.core = PilotCore(facts)
        self.libraries: dict[LibraryId, dict[CallId, None]] = {}
        """Calls of each library; the first call runs."""
        self.queue = EventQueue(self.core, self.carry_out, clock=time.monotonic)
        self.outbox = Outbox()
        self.frame: list[FromPilot] = []
        self.over = False
        self.socket = open_socket(context, name=name, keys=CurveKeys(there.server_key, pair.public, pair.secret))
        self.socket.reconnect_ivl = 100
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.watch = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(there.address)

    def empty(self) -> bool:
        """Read both sockets until they are empty. Return True if a message arrived."""
        while int(self.watch.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.watch.recv_multipart()
            self.greet()
        found = False
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            found = True
            for message in _decode(self.socket.recv()).messages:
                self.queue.handle_event(events.FromManager(message))
            if self.core.state.hello_is_due:
                self.greet()
            self.flush()
        if found and self.core.state.leaving:
            self.queue.handle_event(events.Tick())
            self.flush()
        return found

    def greet(self) -> None:
        self.flush()
        facts = collect_unacknowledged_facts(self.outbox.unacknowledged_frames())
        self.queue.handle_event(events.HelloDue(facts, self.outbox.acknowledged, ()))

    def beat(self) -> None:
        self.queue.handle_event(events.UsageMeasured(dict.fromkeys(self.libraries, _MB), {}, 0))

    def flush(self) -> None:
        if self.frame:
            number = self.outbox.take_next_number()
            frame = wire.encode(self.frame, sequence=number)
            self.frame = []
            self.outbox.keep(number, frame)
            self.socket.send(frame)

    def carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.SendToManager(message=message):
                self.frame.append(message)
            case commands.SendToLibrary(library=number, message=message):
                self.tell(number, message)
            case commands.DropAcknowledgedFrames(sequence=sequence):
                self.outbox.acknowledge(sequence)
            case commands.SendPieces(message=pieces):
                self.socket.send(wire.encode([pieces]))
            case commands.SendHeartbeat(message=heartbeat):
                self.socket.send(wire.encode([heartbeat]))
            case commands.SendHello(hello=hello):
                self.socket.send(wire.encode([hello]))
                for frame in self.outbox.unacknowledged_frames():
                    self.socket.send(frame)
            case commands.PrepareLibrary(ordered=ordered):
                self.queue.handle_event(events.LibraryPrepared(ordered.library, free_disk_bytes=_LARGE))
            case commands.PinObjects(library=number, objects=refs):
                self.queue.handle_event(events.ObjectsPinned(number, {ref.name: ref.source for ref in refs}))
            case commands.StartProcess(ordered=ordered):
                self.libraries[ordered.library] = {}
                self.say(ordered.library, to_agent.Hello(ordered.library, 1), to_agent.Loaded(0.01, _MB, _MB))
            case commands.KillProcess(library=number):
                self.die(number)
            case commands.ObserveLibrary(library=number):
                self.queue.handle_event(
                    events.LibrariesObserved(
                        [events.Observation(number, [(call, 0.0) for call in self.running(number)])]
                    )
                )
            case commands.ExitPilot():
                self.queue.handle_event(events.Farewell())
                self.over = True

    def tell(self, number: LibraryId, message: to_library.ToLibrary) -> None:
        calls = self.libraries.get(number)
        if calls is None:
            return
        match message:
            case to_library.Run(calls=specs):
                calls.update(dict.fromkeys(spec.call for spec in specs))
                self.ledger.again += sum(spec.call in self.ledger.ended for spec in specs)
                if not self.ledger.holds:
                    self.end(number)
            case to_library.GiveBack(count=count, calls=named, order=order):
                waiting = list(calls)[1:]
                back = [call for call in waiting if call in named] if named else waiting[::-1][:count]
                for call in back:
                    del calls[call]
                if back or not named:
                    self.say(number, to_agent.GivenBack(tuple(back), order=order))
            case to_library.Stop():
                self.die(number, runs=False)
            case to_library.Resize(device_memory_bytes=size):
                self.say(number, to_agent.Resized(size))

    def running(self, number: LibraryId) -> tuple[CallId, ...]:
        return tuple(self.libraries.get(number, ()))[:1]

    def say(self, number: LibraryId, *messages: to_agent.ToAgent) -> None:
        self.queue.handle_event(events.FromLibrary(number, messages))

    def die(self, number: LibraryId, *, runs: bool = True) -> None:
        running = self.running(number) if runs else ()
        if self.libraries.pop(number, None) is not None:
            self.queue.handle_event(events.ProcessEnded(number, running=running))

    def end(self, number: LibraryId) -> None:
        calls = self.libraries.get(number)
        if calls:
            self.ledger.ended.update(calls)
            ends = [CallEnd(call, True, _NOTHING, 0.0001) for call in calls]
            calls.clear()
            self.say(number, to_agent.RunsEnded(ends))


def main() -> None:
    asked = side_options(__doc__, session="", pilots=1, devices=2, hold_after=-1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ledger = Ledger(asked.hold_after)
    context: zmq.Context[Any] = zmq.Context()
    context.max_sockets = 3 * asked.pilots + 100
    folder = SessionFolder(asked.session)
    if not folder.key_file("pilot").exists():  # These pilots belong to no block.
        folder.write_key("pilot", KeyPair(*(key.decode() for key in zmq.curve_keypair())))
    pilots = [
        FakePilot(context, folder, f"fake-{number}", devices=asked.devices, ledger=ledger)
        for number in range(asked.pilots)
    ]
    let_go = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: let_go.set())
    serve(pilots, ledger, let_go)
    print(json.dumps({"again": ledger.again}))
    context.destroy(linger=0)


def serve(pilots: list[FakePilot], ledger: Ledger, let_go: threading.Event) -> None:
    """Serve until every pilot must exit, or the manager is absent for a minute.

    The ZeroMQ poller checks every socket each time. This code instead uses one edge-triggered epoll, which requires
    reading each socket until empty.
    """
    waits = select.epoll()
    by_number: dict[int, FakePilot] = {}
    for pilot in pilots:
        for socket in (pilot.socket, pilot.watch):
            number = int(socket.getsockopt(zmq.FD))
            by_number[number] = pilot
            waits.register(number, select.EPOLLIN | select.EPOLLET)
    heard_at = time.monotonic()
    beats = deque((time.monotonic() + HEARTBEAT_S * n / len(pilots), pilot) for n, pilot in enumerate(pilots))
    used = list(pilots)
    while not all(pilot.over for pilot in pilots) and time.monotonic() - heard_at < 60:
        while used:
            used = [pilot for pilot in used if pilot.empty()]
        for number, _ in waits.poll(0.1, maxevents=4096):
            heard_at = time.monotonic()
            used.append(by_number[number])
        if let_go.is_set() and ledger.hold_after >= 0:
            ledger.hold_after, used = -1, list(pilots)
            for pilot in pilots:
                for library in list(pilot.libraries):
                    pilot.end(library)
                pilot.flush()
        now = time.monotonic()
        while beats[0][0] <= now:
            _, pilot = beats.popleft()
            pilot.beat()
            beats.append((now + HEARTBEAT_S, pilot))
            used.append(pilot)


if __name__ == "__main__":
    main()
