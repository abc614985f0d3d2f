"""Pilots that speak the protocol over real sockets and run nothing: as many as one machine can connect to a manager.

    python -m benchmarks.fake_pilots --session DIR --pilots 2000 --devices 2 [--hold-after 1000]

Each is a socket of its own with the session's pilot key, says hello, heartbeats, and answers as a pilot does: a library
is ready at once, and a call ends when it comes. With `--hold-after N` only the first N calls end; later ones are held
until the process gets SIGUSR1, as if they ran long. When the session is over it prints, as JSON, how many calls it was
given and how many of them twice after they had ended.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from stoker.dealer import Keys, open_socket
from stoker.manager.protocol import to_pilot, wire
from stoker.manager.protocol.calls import CallEnd
from stoker.manager.protocol.ids import CallId, DeviceId, LibraryId, RecipeKey
from stoker.manager.protocol.session import KeyPair, SessionFolder
from stoker.manager.protocol.to_manager import (
    CallsEnded,
    CallsReturned,
    DeviceFacts,
    Heartbeat,
    LibraryFacts,
    LibraryGone,
    LibraryReady,
    PilotHello,
)

HEARTBEAT_S = 5.0
_decode = wire.to_pilot_decoder()


class Ledger:
    """What all of them were given and have ended."""

    def __init__(self, hold_after: int) -> None:
        self.hold_after = hold_after
        self.ended: set[int] = set()
        self.given = 0
        self.frames = 0
        self.again = 0

    @property
    def holds(self) -> bool:
        return 0 <= self.hold_after <= len(self.ended)


class FakePilot:
    """One of them."""

    def __init__(
        self, context: zmq.Context[Any], folder: SessionFolder, name: str, *, devices: int, ledger: Ledger
    ) -> None:
        there, pair = folder.read(), folder.read_key("pilot")
        self.session, self.name, self.ledger = there.session, name, ledger
        self.devices = tuple(DeviceFacts(DeviceId(f"cpu:{number}"), "cpu", 8_000_000_000) for number in range(devices))
        self.held: dict[LibraryId, dict[CallId, None]] = {}
        self.facts: dict[LibraryId, tuple[RecipeKey, tuple[DeviceId, ...]]] = {}
        self.sequence = 0
        self.unacked: dict[int, bytes] = {}
        self.over = False
        self.socket = open_socket(context, name=name, keys=Keys(there.server_key, pair.public, pair.secret))
        self.socket.reconnect_ivl = 100
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.watch = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(there.address)

    def look(self) -> None:
        """Greet on a new connection."""
        while self.watch.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self.watch.recv_multipart()
            self.greet()

    def empty(self) -> bool:
        """Take everything that has come. Whether there was anything."""
        self.look()
        found = False
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            found = True
            for message in _decode(self.socket.recv()).messages:
                self.hear(message)
        return found

    def greet(self) -> None:
        libraries = tuple(
            LibraryFacts(number, *self.facts[number], True, tuple(held)) for number, held in self.held.items()
        )
        hello = PilotHello(
            wire.VERSION, self.session, self.name, 1, self.devices, libraries=libraries,
            acknowledged=min(self.unacked, default=self.sequence + 1) - 1,
        )  # fmt: skip
        self.socket.send(wire.encode([hello]))
        for frame in self.unacked.values():
            self.socket.send(frame)

    def say(self, *messages: Any) -> None:
        self.sequence += 1
        frame = self.unacked[self.sequence] = wire.encode(list(messages), sequence=self.sequence)
        self.socket.send(frame)

    def hear(self, message: to_pilot.ToPilot) -> None:
        match message:
            case to_pilot.RunCalls(library=number, calls=specs):
                held = self.held.setdefault(number, {})
                held.update(dict.fromkeys(spec.call for spec in specs))
                self.ledger.given += len(specs)
                self.ledger.frames += 1
                self.ledger.again += sum(spec.call in self.ledger.ended for spec in specs)
                if not self.ledger.holds:
                    self.end(number)
            case to_pilot.StartLibrary(library=number, recipe=recipe, devices=devices):
                self.held[number] = {}
                self.facts[number] = (RecipeKey(recipe.key), devices)
                self.say(LibraryReady(number, 0.01, 0.01, 1_000_000, 1_000_000))
            case to_pilot.StopLibrary(library=number):
                left = tuple(self.held.pop(number, {}))
                self.say(LibraryGone(number, unstarted=left))
            case to_pilot.TakeBack(library=number, count=count):
                held = self.held.get(number, {})
                back = tuple(list(held)[1:][-count:])
                for call in back:
                    del held[call]
                self.say(CallsReturned(number, back))
            case to_pilot.Ack(sequence=sequence):
                self.unacked = {number: frame for number, frame in self.unacked.items() if number > sequence}
            case to_pilot.Exit() | to_pilot.PilotRefused():
                self.over = True
            case to_pilot.HelloAgain(acknowledged=sequence):
                self.unacked = {number: frame for number, frame in self.unacked.items() if number > sequence}
                self.greet()
            case _:
                pass

    def end(self, number: LibraryId) -> None:
        held = self.held.get(number)
        if held:
            self.ledger.ended.update(held)
            self.say(CallsEnded(number, [CallEnd(call, True, b"\x80\x04N.", 0.0001) for call in held]))
            held.clear()


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--session", required=True)
    ask.add_argument("--pilots", type=int, default=1)
    ask.add_argument("--devices", type=int, default=2)
    ask.add_argument("--hold-after", type=int, default=-1, metavar="N", help="only the first N calls end by themselves")
    asked = ask.parse_args()
    _many_files()
    ledger = Ledger(asked.hold_after)
    context: zmq.Context[Any] = zmq.Context()
    context.max_sockets = 3 * asked.pilots + 100
    folder = SessionFolder(asked.session)
    if not folder.key_file("pilot").exists():  # these pilots are of no block
        folder.write_key("pilot", KeyPair(*(key.decode() for key in zmq.curve_keypair())))
    pilots = [
        FakePilot(context, folder, f"fake-{number}", devices=asked.devices, ledger=ledger)
        for number in range(asked.pilots)
    ]
    let_go = False

    def release(_number: int, _frame: Any) -> None:
        nonlocal let_go
        let_go = True

    signal.signal(signal.SIGUSR1, release)
    serve(pilots, ledger, lambda: let_go)
    found = {"given": ledger.given, "again": ledger.again, "ended": len(ledger.ended), "frames": ledger.frames}
    print(json.dumps(found))
    context.destroy(linger=0)


def serve(pilots: list[FakePilot], ledger: Ledger, let_go: Callable[[], bool]) -> None:
    """Until every pilot has been told to go, or the manager is away for a minute.

    One epoll over the sockets' descriptors: ZeroMQ's own poller looks at every socket each time. They are
    edge-triggered, so a socket is emptied whenever it was used.
    """
    waits = select.epoll()
    by_number: dict[int, FakePilot] = {}
    for pilot in pilots:
        for socket in (pilot.socket, pilot.watch):
            number = int(socket.getsockopt(zmq.FD))
            by_number[number] = pilot
            waits.register(number, select.EPOLLIN | select.EPOLLET)
    heard_at, released = time.monotonic(), False
    beats = deque((time.monotonic() + HEARTBEAT_S * n / len(pilots), pilot) for n, pilot in enumerate(pilots))
    used = list(pilots)
    while not all(pilot.over for pilot in pilots) and time.monotonic() - heard_at < 60:
        while used:
            used = [pilot for pilot in used if pilot.empty()]
        for number, _ in waits.poll(0.1, maxevents=4096):
            heard_at = time.monotonic()
            used.append(by_number[number])
        if let_go() and not released:
            released, ledger.hold_after, used = True, -1, list(pilots)
            for pilot in pilots:
                for library in list(pilot.held):
                    pilot.end(library)
        now = time.monotonic()
        while beats[0][0] <= now:
            _, pilot = beats.popleft()
            pilot.socket.send(wire.encode([Heartbeat()]))
            beats.append((now + HEARTBEAT_S, pilot))
            used.append(pilot)


def _many_files() -> None:
    """A socket takes two descriptors."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
